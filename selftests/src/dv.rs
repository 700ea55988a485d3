// SPDX-License-Identifier: GPL-2.0
//! The functions of infiniband/metarocedv.h, from libmetaroce.so.1: found at run time, so that
//! the other programs need nothing but libibverbs.
//!
//! Unsafe because it calls C functions, at addresses that dlsym gives; what it offers is safe.

use crate::ffi;
use crate::verbs::{Context, Qp};
use std::ffi::{c_int, c_void, CStr};
use std::io;
use std::sync::Arc;

pub use ffi::{
    metaroce_connection as Connection, metaroce_path as Path, metaroce_qp_attr as QpAttr,
    metaroce_transition as Transition, METAROCE_CONNECTION_NONE, METAROCE_CONNECTION_UP,
    METAROCE_CONTROLLER_AIMD, METAROCE_CONTROLLER_DEFAULT, METAROCE_CONTROLLER_FIXED, METAROCE_MAX_LISTENERS,
    METAROCE_MAX_PATHS, METAROCE_MAX_TRANSITIONS, METAROCE_ORDERING_RELAXED, METAROCE_ORDERING_STRICT,
    METAROCE_PATH_FAILED, METAROCE_PATH_GOOD, METAROCE_PATH_SUSPECT, METAROCE_QP_CONTROLLER,
    METAROCE_QP_EVENTS, METAROCE_QP_ORDERING, METAROCE_QP_PATHS, METAROCE_QP_PLANES,
};

type Supported = unsafe extern "C" fn(*mut ffi::ibv_device) -> bool;
type Query =
    unsafe extern "C" fn(*mut ffi::ibv_qp, *mut c_void, usize, *mut c_void, usize, *mut u32) -> c_int;
type Modify = unsafe extern "C" fn(*mut ffi::ibv_qp, *const c_void, usize) -> c_int;
type Transitions = unsafe extern "C" fn(*mut ffi::ibv_qp, *mut u64, *mut c_void, usize, *mut u32) -> c_int;

/// The library.
pub struct Dv {
    supported: Supported,
    query: Query,
    modify: Modify,
    transitions: Transitions,
}

fn result(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

impl Dv {
    /// Loads the library; an error names what is missing.
    pub fn load() -> io::Result<Self> {
        // SAFETY: a name that ends in NUL; the library's constructor registers with libibverbs.
        let library = unsafe { ffi::dlopen(c"libmetaroce.so.1".as_ptr(), ffi::RTLD_NOW as c_int) };
        if library.is_null() {
            return Err(io::Error::other("there is no libmetaroce.so.1"));
        }
        let find = |name: &CStr| {
            // SAFETY: the handle from dlopen, which is never closed, and a name.
            let symbol = unsafe { ffi::dlsym(library, name.as_ptr()) };
            if symbol.is_null() {
                return Err(io::Error::other(format!("libmetaroce.so.1 lacks {name:?}")));
            }
            Ok(symbol)
        };
        // SAFETY: the header gives the functions of these names these types.
        unsafe {
            Ok(Dv {
                supported: std::mem::transmute::<*mut c_void, Supported>(find(c"metarocedv_is_supported")?),
                query: std::mem::transmute::<*mut c_void, Query>(find(c"_metarocedv_query")?),
                modify: std::mem::transmute::<*mut c_void, Modify>(find(c"_metarocedv_modify")?),
                transitions: std::mem::transmute::<*mut c_void, Transitions>(find(
                    c"_metarocedv_transitions",
                )?),
            })
        }
    }

    /// metarocedv_is_supported
    pub fn supports(&self, context: &Context) -> bool {
        // SAFETY: an open context has a device.
        unsafe { (self.supported)((*context.raw()).device) }
    }

    /// metarocedv_query_paths, with room for all.
    pub fn paths(&self, qp: &Qp) -> io::Result<(Connection, Vec<Path>)> {
        let mut connection = Connection::default();
        let mut paths = vec![Path::default(); METAROCE_MAX_PATHS as usize];
        let mut count = METAROCE_MAX_PATHS;
        // SAFETY: structures of the sizes that are given; `count` is the length of the vector.
        result(unsafe {
            (self.query)(
                qp.raw(),
                (&raw mut connection).cast(),
                size_of::<Connection>(),
                paths.as_mut_ptr().cast(),
                size_of::<Path>(),
                &mut count,
            )
        })?;
        paths.truncate(count as usize);
        Ok((connection, paths))
    }

    /// metarocedv_query_connection as a program does it whose structure has `len` bytes (at most
    /// 1024): these bytes, with 0xee where nothing was written.
    pub fn connection_bytes(&self, qp: &Qp, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0xee; 1024.max(len)];
        // SAFETY: the vector is at least as long.
        result(unsafe {
            (self.query)(
                qp.raw(),
                bytes.as_mut_ptr().cast(),
                len,
                std::ptr::null_mut(),
                0,
                std::ptr::null_mut(),
            )
        })?;
        Ok(bytes)
    }

    /// metarocedv_query_paths as a program does it whose structure has `size` bytes, with room for
    /// `count`: all bytes.
    pub fn path_bytes(&self, qp: &Qp, size: usize, mut count: u32) -> io::Result<(u32, Vec<u8>)> {
        let mut connection = Connection::default();
        let mut bytes = vec![0xee; (size * count as usize).max(1)];
        // SAFETY: the vector has room for so many elements.
        result(unsafe {
            (self.query)(
                qp.raw(),
                (&raw mut connection).cast(),
                size_of::<Connection>(),
                bytes.as_mut_ptr().cast(),
                size,
                &mut count,
            )
        })?;
        Ok((count, bytes))
    }

    /// metarocedv_query_connection for the queue pair with the handle of `qp` in `context`, which
    /// is another one's.
    pub fn foreign(&self, qp: &Qp, context: &Arc<Context>) -> io::Result<Connection> {
        let mut connection = Connection::default();
        // SAFETY: a copy of the structure with a context that lives; the function reads the
        // handle, the context and its file alone.
        result(unsafe {
            let mut copy = std::mem::ManuallyDrop::new(std::ptr::read(qp.raw()));
            copy.context = context.raw();
            (self.query)(
                &mut *copy,
                (&raw mut connection).cast(),
                size_of::<Connection>(),
                std::ptr::null_mut(),
                0,
                std::ptr::null_mut(),
            )
        })?;
        Ok(connection)
    }

    /// metarocedv_modify_qp
    pub fn modify(&self, qp: &Qp, attr: &QpAttr) -> io::Result<()> {
        // SAFETY: a structure of this size.
        result(unsafe { (self.modify)(qp.raw(), (&raw const *attr).cast(), size_of::<QpAttr>()) })
    }

    /// metarocedv_modify_qp as a program does it whose structure has `len` bytes: those of `attr`,
    /// cut off, or with `tail` behind them.
    pub fn modify_as(&self, qp: &Qp, attr: &QpAttr, len: usize, tail: u8) -> io::Result<()> {
        let whole: *const u8 = (&raw const *attr).cast();
        // SAFETY: the structure has no padding.
        let whole = unsafe { std::slice::from_raw_parts(whole, size_of::<QpAttr>()) };
        let mut bytes = whole.to_vec();
        bytes.resize(len, tail);
        // SAFETY: so many bytes are there.
        result(unsafe { (self.modify)(qp.raw(), bytes.as_ptr().cast(), bytes.len()) })
    }

    /// metarocedv_read_transitions, with room for `room`.
    pub fn transitions(&self, qp: &Qp, next: &mut u64, room: usize) -> io::Result<Vec<Transition>> {
        let mut list = vec![Transition::default(); room];
        let mut count = room as u32;
        // SAFETY: the vector has room for `count` elements.
        result(unsafe {
            (self.transitions)(qp.raw(), next, list.as_mut_ptr().cast(), size_of::<Transition>(), &mut count)
        })?;
        list.truncate(count as usize);
        Ok(list)
    }
}
