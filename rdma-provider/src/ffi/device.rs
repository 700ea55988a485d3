// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB

//! Device and context: how libibverbs finds this library, opens the device and asks about it.
//!
//! Matching is by driver id alone, which the kernel reports over netlink: a renamed device is
//! still ours, and somebody else's device never is. The ABI version is agreed on when the context
//! is made: this library says which versions it speaks, the kernel chooses.

use core::cell::UnsafeCell;
use core::ffi::{c_char, c_int, c_void};
use core::mem::{offset_of, MaybeUninit};
use core::ptr::{addr_of_mut, null_mut};

use super::{allocate, cq, errno, free, memory, qp, set_errno, srq, sys, zeroed, With};
use crate::abi::{
    metaroce_alloc_ucontext_req, metaroce_alloc_ucontext_resp, ABI_VERSIONS, METAROCE_DRIVER_ID,
};
use crate::errno::{Errno, EOPNOTSUPP, EPROTO};
use crate::ring::Lock;

/// The driver id as libibverbs' tables want it.
const DRIVER_ID: u64 = METAROCE_DRIVER_ID as u64;

/// Bytes of the longest message: what the core's attribute says at most.
const MAX_MESSAGE: u32 = 1 << 31;

/// Kilohertz of the clock of completions, which counts nanoseconds.
const CLOCK_KHZ: u64 = 1_000_000;

/// A table of constants that C reads.
#[repr(transparent)]
pub(crate) struct Table<T>(T);

// SAFETY: never written; the pointers in it point to other constants.
unsafe impl<T> Sync for Table<T> {}

static MATCHES: Table<[sys::verbs_match_ent; 2]> = Table([
    sys::verbs_match_ent {
        driver_data: null_mut(),
        u: sys::verbs_match_ent__bindgen_ty_1 { driver_id: DRIVER_ID },
        vendor: 0,
        device: 0,
        kind: sys::VERBS_MATCH_DRIVER_ID as u8,
    },
    sys::verbs_match_ent {
        driver_data: null_mut(),
        u: sys::verbs_match_ent__bindgen_ty_1 { driver_id: 0 },
        vendor: 0,
        device: 0,
        kind: sys::VERBS_MATCH_SENTINEL as u8,
    },
]);

/// Every kernel ABI passes libibverbs' own check: the versions are compared when the context is
/// made, where the kernel takes part and the message can say more. The symbol is the one that a
/// static build of libibverbs looks for.
#[no_mangle]
#[allow(non_upper_case_globals)]
pub(crate) static verbs_provider_metaroce: Table<sys::verbs_device_ops> = Table(sys::verbs_device_ops {
    name: c"metaroce".as_ptr(),
    match_min_abi_version: 0,
    match_max_abi_version: u32::MAX,
    match_table: MATCHES.0.as_ptr(),
    static_providers: null_mut(),
    match_device: None,
    alloc_context: Some(alloc_context),
    import_context: None,
    alloc_device: Some(alloc_device),
    uninit_device: Some(uninit_device),
});

/// Whether this library drives the device.
///
/// # Safety
///
/// `device` is from libibverbs.
pub(super) unsafe fn is_ours(device: *mut sys::ibv_device) -> bool {
    // SAFETY: ibv_device is at the start of verbs_device.
    let ops = unsafe { (*device.cast::<sys::verbs_device>()).ops };
    core::ptr::eq(ops, &raw const verbs_provider_metaroce.0)
}

extern "C" fn register() {
    // SAFETY: the table lives as long as the library, which libibverbs never unloads.
    unsafe { sys::verbs_register_driver_34(&raw const verbs_provider_metaroce.0) }
}

/// Runs when the library is loaded. Not in the tests, which are no plugin.
#[cfg_attr(not(test), used, link_section = ".init_array")]
#[cfg_attr(test, allow(dead_code))]
static REGISTER: extern "C" fn() = register;

static CONTEXT_OPS: Table<sys::verbs_context_ops> = Table({
    // SAFETY: function pointers, all of them optional.
    let mut ops: sys::verbs_context_ops = unsafe { MaybeUninit::zeroed().assume_init() };
    ops.query_device_ex = Some(query_device_ex);
    ops.query_port = Some(query_port);
    ops.query_rt_values = Some(query_rt_values);
    ops.free_context = Some(free_context);
    ops.alloc_pd = Some(memory::alloc_pd);
    ops.dealloc_pd = Some(memory::dealloc_pd);
    ops.reg_mr = Some(memory::reg_mr);
    ops.rereg_mr = Some(memory::rereg_mr);
    ops.dereg_mr = Some(memory::dereg_mr);
    ops.reg_dmabuf_mr = Some(memory::reg_dmabuf_mr);
    ops.alloc_mw = Some(memory::alloc_mw);
    ops.dealloc_mw = Some(memory::dealloc_mw);
    ops.bind_mw = Some(memory::bind_mw);
    ops.create_ah = Some(memory::create_ah);
    ops.destroy_ah = Some(memory::destroy_ah);
    ops.create_cq = Some(cq::create_cq);
    ops.create_cq_ex = Some(cq::create_cq_ex);
    ops.poll_cq = Some(cq::poll_cq);
    ops.req_notify_cq = Some(cq::req_notify_cq);
    ops.cq_event = Some(cq::cq_event);
    ops.resize_cq = Some(cq::resize_cq);
    ops.destroy_cq = Some(cq::destroy_cq);
    ops.create_srq = Some(srq::create_srq);
    ops.create_srq_ex = Some(srq::create_srq_ex);
    ops.modify_srq = Some(srq::modify_srq);
    ops.query_srq = Some(srq::query_srq);
    ops.destroy_srq = Some(srq::destroy_srq);
    ops.post_srq_recv = Some(srq::post_srq_recv);
    ops.create_qp = Some(qp::create_qp);
    ops.create_qp_ex = Some(qp::create_qp_ex);
    ops.query_qp = Some(qp::query_qp);
    ops.query_qp_data_in_order = Some(qp::query_qp_data_in_order);
    ops.modify_qp = Some(qp::modify_qp);
    ops.destroy_qp = Some(qp::destroy_qp);
    ops.post_send = Some(qp::post_send);
    ops.post_recv = Some(qp::post_recv);
    ops.attach_mcast = Some(qp::attach_mcast);
    ops.detach_mcast = Some(qp::detach_mcast);
    ops
});

/// An open device.
#[repr(C)]
pub(crate) struct Context {
    /// libibverbs writes it while this library has references to the rest.
    vctx: UnsafeCell<sys::verbs_context>,
    /// Bytes of the longest message.
    pub(crate) max_message: u64,
    /// Queue pairs that are being destroyed; see `qp`.
    pub(crate) dying: Lock<qp::Dying>,
}

impl Context {
    /// The context that libibverbs calls `context`.
    ///
    /// # Safety
    ///
    /// It was made by [`alloc_context`] and lives as long as the result.
    pub(crate) unsafe fn of<'a>(context: *mut sys::ibv_context) -> &'a Context {
        // SAFETY: `vctx` is at the start of Context, and the ibv_context inside it.
        unsafe { &*context.byte_sub(offset_of!(sys::verbs_context, context)).cast::<Context>() }
    }
}

unsafe extern "C" fn alloc_device(_sysfs: *mut sys::verbs_sysfs_dev) -> *mut sys::verbs_device {
    allocate::<sys::verbs_device>().map_or(null_mut(), |device| device.as_ptr())
}

unsafe extern "C" fn uninit_device(device: *mut sys::verbs_device) {
    // SAFETY: made by `alloc_device`; libibverbs is done with it.
    unsafe { free(device) }
}

/// Where libibverbs itself says why it does not use a device.
const STDERR: c_int = 2;

/// Says why this library and the kernel module do not meet, and which of them is too old, on the
/// descriptor `to`.
///
/// # Safety
///
/// `device` is from libibverbs.
pub(super) unsafe fn explain_mismatch(device: *mut sys::ibv_device, to: c_int) {
    let device = device.cast::<sys::verbs_device>();
    // SAFETY: ibv_device is at the start of verbs_device; sysfs may be NULL.
    let (name, sysfs) = unsafe { ((&raw const (*device).device.name).cast::<c_char>(), (*device).sysfs) };
    // SAFETY: set when the device was found, or NULL.
    let kernel = if sysfs.is_null() { 0 } else { unsafe { (*sysfs).abi_ver } };
    let (low, high) = (*ABI_VERSIONS.start(), *ABI_VERSIONS.end());
    let text = if kernel < low {
        c"metaroce: %s: the kernel module is too old for this plugin: it speaks ABI versions up to %u, the plugin %u to %u; upgrade the module\n"
    } else {
        c"metaroce: %s: this plugin is too old for the kernel module: the module speaks ABI versions up to %u, the plugin %u to %u; upgrade the plugin\n"
    };
    // SAFETY: the format takes a string and three numbers; the name ends in NUL.
    unsafe { sys::dprintf(to, text.as_ptr(), name, kernel, low, high) };
}

/// Agrees with the kernel on an ABI version.
unsafe fn get_context(vctx: *mut sys::verbs_context) -> Result<(), Errno> {
    let mut request: With<sys::ibv_get_context, metaroce_alloc_ucontext_req> = zeroed();
    request.driver.abi_min = *ABI_VERSIONS.start();
    request.driver.abi_max = *ABI_VERSIONS.end();
    let mut response: With<sys::ib_uverbs_get_context_resp, metaroce_alloc_ucontext_resp> = zeroed();
    // SAFETY: both structures have the given sizes.
    let error = unsafe {
        sys::ibv_cmd_get_context(
            vctx,
            &mut request.core,
            size_of_val(&request),
            &mut response.core,
            size_of_val(&response),
        )
    };
    match error {
        0 if ABI_VERSIONS.contains(&response.driver.abi_version) => Ok(()),
        0 => Err(EPROTO),
        error => Err(error),
    }
}

unsafe extern "C" fn alloc_context(
    device: *mut sys::ibv_device,
    cmd_fd: c_int,
    _private: *mut c_void,
) -> *mut sys::verbs_context {
    // libibverbs wants the offset of the verbs_context as a pointer; it is the start.
    const { assert!(offset_of!(Context, vctx) == 0) };
    // SAFETY: libibverbs allocates and initialises the structure; it closes `cmd_fd` on failure.
    let context = unsafe {
        sys::_verbs_init_and_alloc_context(
            device,
            cmd_fd,
            size_of::<Context>(),
            null_mut(),
            METAROCE_DRIVER_ID,
        )
    }
    .cast::<Context>();
    if context.is_null() {
        return null_mut();
    }
    // SAFETY: `context` is the new structure, not shared so far.
    unsafe {
        addr_of_mut!((*context).dying).write(Lock::new(qp::Dying::default()));
        let vctx = context.cast::<sys::verbs_context>();
        if let Err(error) = get_context(vctx) {
            if error == EPROTO {
                explain_mismatch(device, STDERR);
            }
            sys::verbs_uninit_context(vctx);
            free(context);
            set_errno(error);
            return null_mut();
        }
        sys::verbs_set_ops(vctx, &raw const CONTEXT_OPS.0);

        let mut port: sys::ibv_port_attr = zeroed();
        let known = query_port(addr_of_mut!((*vctx).context), 1, &mut port) == 0 && port.max_msg_sz != 0;
        let max_message = if known { port.max_msg_sz.min(MAX_MESSAGE) } else { MAX_MESSAGE };
        addr_of_mut!((*context).max_message).write(u64::from(max_message));
        vctx
    }
}

unsafe extern "C" fn free_context(context: *mut sys::ibv_context) {
    // SAFETY: the program has destroyed what belongs to the context; `vctx` is at its start.
    unsafe {
        let vctx = context.byte_sub(offset_of!(sys::verbs_context, context)).cast::<sys::verbs_context>();
        sys::verbs_uninit_context(vctx);
        free(vctx);
    }
}

unsafe extern "C" fn query_device_ex(
    context: *mut sys::ibv_context,
    input: *const sys::ibv_query_device_ex_input,
    attr: *mut sys::ibv_device_attr_ex,
    attr_size: usize,
) -> c_int {
    let mut response: sys::ib_uverbs_ex_query_device_resp = zeroed();
    let mut size = size_of_val(&response);
    // SAFETY: `attr` has `attr_size` bytes, the response has `size`.
    let error =
        unsafe { sys::ibv_cmd_query_device_any(context, input, attr, attr_size, &mut response, &mut size) };
    if error != 0 {
        return error;
    }
    let version = response.base.fw_ver;
    // SAFETY: the command succeeded, so `attr` holds at least `orig_attr`, with 64 bytes for the
    // text of three 16-bit numbers; the fields behind it are written only where they fit.
    unsafe {
        let text = &raw mut (*attr).orig_attr.fw_ver;
        let (major, minor, patch) =
            ((version >> 32) as u32 & 0xffff, (version >> 16) as u32 & 0xffff, version as u32 & 0xffff);
        sys::snprintf(text.cast(), size_of_val(&*text) as _, c"%u.%u.%u".as_ptr(), major, minor, patch);
        // The time of a completion is part of the ABI: nanoseconds.
        const END: usize = offset_of!(sys::ibv_device_attr_ex, hca_core_clock) + size_of::<u64>();
        if attr_size >= END {
            (*attr).completion_timestamp_mask = u64::MAX;
            (*attr).hca_core_clock = CLOCK_KHZ;
        }
    }
    0
}

unsafe extern "C" fn query_port(
    context: *mut sys::ibv_context,
    port: u8,
    attr: *mut sys::ibv_port_attr,
) -> c_int {
    let mut command: sys::ibv_query_port = zeroed();
    // SAFETY: the structure has the given size.
    unsafe { sys::ibv_cmd_query_port(context, port, attr, &mut command, size_of_val(&command)) }
}

/// The clock of completions: nanoseconds of CLOCK_MONOTONIC, as a count in `tv_nsec`.
unsafe extern "C" fn query_rt_values(
    _context: *mut sys::ibv_context,
    values: *mut sys::ibv_values_ex,
) -> c_int {
    // SAFETY: `values` is the program's structure.
    let values = unsafe { &mut *values };
    let wanted = values.comp_mask;
    values.comp_mask = 0;
    if wanted & !sys::IBV_VALUES_MASK_RAW_CLOCK != 0 {
        return EOPNOTSUPP;
    }
    if wanted & sys::IBV_VALUES_MASK_RAW_CLOCK != 0 {
        let mut now: sys::timespec = zeroed();
        // SAFETY: `now` is writable.
        if unsafe { sys::clock_gettime(sys::CLOCK_MONOTONIC as i32, &mut now) } != 0 {
            return errno();
        }
        values.raw_clock.tv_sec = 0;
        values.raw_clock.tv_nsec = now.tv_sec.wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec);
        values.comp_mask = sys::IBV_VALUES_MASK_RAW_CLOCK;
    }
    0
}
