// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB

//! The functions of `metarocedv.h`: ioctls of the object `METAROCE_OBJECT_QP`, which the kernel
//! module answers. Sizes are passed on as the program gives them.

use core::ffi::c_int;
use core::ptr::{addr_of, addr_of_mut};

use super::{device, errno, sys, zeroed};
use crate::abi;
use crate::errno::{Errno, EINVAL, EOPNOTSUPP};

/// The driver id as the ioctl wants it.
const DRIVER_ID: u32 = abi::METAROCE_DRIVER_ID;

/// An ioctl of uverbs.
#[repr(C)]
struct Command<const N: usize> {
    header: sys::ib_uverbs_ioctl_hdr,
    attrs: [sys::ib_uverbs_attr; N],
}

/// An attribute: a handle, a pointer, or input of at most 8 bytes.
fn attribute(id: u32, len: u16, data: u64) -> sys::ib_uverbs_attr {
    let mut attr: sys::ib_uverbs_attr = zeroed();
    attr.attr_id = id as u16;
    attr.len = len;
    attr.flags = sys::UVERBS_ATTR_F_MANDATORY as u16;
    attr.__bindgen_anon_1.data = data;
    attr
}

/// An attribute that lies at `p`. `EINVAL`: longer than the interface can say.
fn pointer<T>(id: u32, p: *const T, len: usize) -> Result<sys::ib_uverbs_attr, Errno> {
    if p.is_null() {
        return Err(EINVAL);
    }
    let len = u16::try_from(len).map_err(|_| EINVAL)?;
    Ok(attribute(id, len, p as usize as u64))
}

/// Calls `method` with `attrs`.
///
/// # Safety
///
/// `qp` is a queue pair; attributes that are pointers are valid for what the method does.
unsafe fn call<const N: usize>(
    qp: *mut sys::ibv_qp,
    method: u32,
    attrs: [sys::ib_uverbs_attr; N],
) -> Result<(), Errno> {
    // SAFETY: a queue pair has a context, and that a device.
    let context = unsafe { (*qp).context };
    // SAFETY: as above.
    if !unsafe { device::is_ours((*context).device) } {
        return Err(EOPNOTSUPP);
    }
    let mut command = Command { header: zeroed(), attrs };
    command.header.length = size_of::<Command<N>>() as u16;
    command.header.object_id = abi::METAROCE_OBJECT_QP as u16;
    command.header.method_id = method as u16;
    command.header.num_attrs = N as u16;
    command.header.driver_id = DRIVER_ID;
    // SAFETY: the file of the context; the command has the length that it says.
    let r = unsafe { sys::ioctl((*context).cmd_fd, sys::METAROCE_VERBS_IOCTL.into(), addr_of_mut!(command)) };
    match r {
        -1 => match errno() as u32 {
            // A module without these methods.
            sys::EPROTONOSUPPORT | sys::ENOTTY => Err(EOPNOTSUPP),
            error => Err(error as Errno),
        },
        _ => Ok(()),
    }
}

fn number(r: Result<(), Errno>) -> c_int {
    match r {
        Ok(()) => 0,
        Err(error) => error,
    }
}

/// `metarocedv_is_supported` of the header.
///
/// # Safety
///
/// `device` is NULL or from libibverbs.
#[no_mangle]
pub unsafe extern "C" fn metarocedv_is_supported(device: *mut sys::ibv_device) -> bool {
    // SAFETY: the caller's promise.
    !device.is_null() && unsafe { device::is_ours(device) }
}

/// `metarocedv_query_connection` and `metarocedv_query_paths` of the header.
///
/// # Safety
///
/// `qp` is a queue pair; `connection` has `connection_size` bytes; `paths` is NULL, or has room
/// for `*count` elements of `path_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn _metarocedv_query(
    qp: *mut sys::ibv_qp,
    connection: *mut abi::metaroce_connection,
    connection_size: usize,
    paths: *mut abi::metaroce_path,
    path_size: usize,
    count: *mut u32,
) -> c_int {
    // SAFETY: the caller's promise.
    number(unsafe { query(qp, connection, connection_size, paths, path_size, count) })
}

unsafe fn query(
    qp: *mut sys::ibv_qp,
    connection: *mut abi::metaroce_connection,
    connection_size: usize,
    paths: *mut abi::metaroce_path,
    path_size: usize,
    count: *mut u32,
) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    let handle = attribute(abi::METAROCE_QUERY_QP, 0, u64::from(unsafe { (*qp).handle }));
    let out = pointer(abi::METAROCE_QUERY_CONNECTION, connection, connection_size)?;
    if paths.is_null() || count.is_null() {
        // SAFETY: `connection` has its size.
        return unsafe { call(qp, abi::METAROCE_METHOD_QUERY, [handle, out]) };
    }
    // The number of paths comes with the connection, even when the program's ends before it.
    let mut whole = abi::metaroce_connection::default();
    // SAFETY: `count` is the program's.
    let room = unsafe { (*count).min(abi::METAROCE_MAX_PATHS) };
    let stride = u32::try_from(path_size).map_err(|_| EINVAL)?;
    let bytes = path_size.checked_mul(room as usize).filter(|n| *n != 0).ok_or(EINVAL)?;
    let attrs = [
        handle,
        pointer(abi::METAROCE_QUERY_CONNECTION, addr_of_mut!(whole), size_of_val(&whole))?,
        attribute(abi::METAROCE_QUERY_PATH_SIZE, size_of::<u32>() as u16, u64::from(stride)),
        pointer(abi::METAROCE_QUERY_PATHS, paths, bytes)?,
    ];
    // SAFETY: all pointers have the sizes that are given with them.
    unsafe { call(qp, abi::METAROCE_METHOD_QUERY, attrs)? };
    let known = size_of_val(&whole).min(connection_size);
    // SAFETY: `connection` has `connection_size` bytes, zeros where this library knows nothing.
    unsafe {
        let to = connection.cast::<u8>();
        to.write_bytes(0, connection_size);
        to.copy_from_nonoverlapping(addr_of!(whole).cast::<u8>(), known);
        *count = whole.paths.min(room);
    }
    Ok(())
}

/// `metarocedv_modify_qp` of the header.
///
/// # Safety
///
/// `qp` is a queue pair; `attr` has `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn _metarocedv_modify(
    qp: *mut sys::ibv_qp,
    attr: *const abi::metaroce_qp_attr,
    size: usize,
) -> c_int {
    let modify = || {
        // SAFETY: the caller's promise.
        let handle = attribute(abi::METAROCE_MODIFY_QP, 0, u64::from(unsafe { (*qp).handle }));
        // Input of 8 bytes or less would have to be in the attribute.
        if size <= size_of::<u64>() {
            return Err(EINVAL);
        }
        let attrs = [handle, pointer(abi::METAROCE_MODIFY_ATTR, attr, size)?];
        // SAFETY: `attr` has its size.
        unsafe { call(qp, abi::METAROCE_METHOD_MODIFY, attrs) }
    };
    number(modify())
}

/// `metarocedv_read_transitions` of the header.
///
/// # Safety
///
/// `qp` is a queue pair; `list` has room for `*count` elements of `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn _metarocedv_transitions(
    qp: *mut sys::ibv_qp,
    next: *mut u64,
    list: *mut abi::metaroce_transition,
    size: usize,
    count: *mut u32,
) -> c_int {
    // SAFETY: the caller's promise.
    number(unsafe { transitions(qp, next, list, size, count) })
}

unsafe fn transitions(
    qp: *mut sys::ibv_qp,
    next: *mut u64,
    list: *mut abi::metaroce_transition,
    size: usize,
    count: *mut u32,
) -> Result<(), Errno> {
    // An element begins with its number, which is read below.
    if next.is_null() || count.is_null() || size < size_of::<u64>() {
        return Err(EINVAL);
    }
    // SAFETY: the caller's promise.
    let (handle, from, room) = unsafe { ((*qp).handle, *next, (*count).min(abi::METAROCE_MAX_TRANSITIONS)) };
    let bytes = size.checked_mul(room as usize).filter(|n| *n != 0).ok_or(EINVAL)?;
    let stride = u32::try_from(size).map_err(|_| EINVAL)?;
    let mut copied = 0u32;
    let attrs = [
        attribute(abi::METAROCE_TRANSITIONS_QP, 0, u64::from(handle)),
        attribute(abi::METAROCE_TRANSITIONS_FROM, size_of::<u64>() as u16, from),
        attribute(abi::METAROCE_TRANSITIONS_SIZE, size_of::<u32>() as u16, u64::from(stride)),
        pointer(abi::METAROCE_TRANSITIONS_LIST, list, bytes)?,
        pointer(abi::METAROCE_TRANSITIONS_COUNT, addr_of_mut!(copied), size_of_val(&copied))?,
    ];
    // SAFETY: all pointers have the sizes that are given with them.
    unsafe { call(qp, abi::METAROCE_METHOD_TRANSITIONS, attrs)? };
    let copied = copied.min(room);
    // SAFETY: `list` has so many elements, `count` and `next` are the program's.
    unsafe {
        *count = copied;
        if let Some(last) = (copied as usize).checked_sub(1) {
            let at = list.cast::<u8>().add(last.saturating_mul(size)).cast::<u64>();
            *next = at.read_unaligned().saturating_add(1);
        }
    }
    Ok(())
}
