// SPDX-License-Identifier: GPL-2.0

//! The files `planes/*` of a device (the RDMA core has room for one directory). They are declared
//! in helpers.c, where the macros for them can be used. While one is written or read, the device is
//! not deallocated: its removal waits.
//!
//! C header: `include/linux/sysfs.h`.

use super::ib::{self, Operations};
use crate::{bindings, verbs::device::Driver};
use ::core::{
    fmt::{self, Write},
    slice,
};
use ::kernel::{
    error::from_result,
    ffi::{c_char, c_int},
    prelude::*,
    str::NullTerminatedFormatter,
};

/// What is to be done with a plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It becomes one.
    Add,
    /// It is none any more.
    Delete,
    /// It gets nothing new.
    Drain,
    /// It is used again.
    Resume,
}

/// A file was written.
///
/// # Safety
///
/// Called by the files alone: `raw` is a device of this driver that is not deallocated
/// meanwhile, `text` has `len` bytes.
#[no_mangle]
unsafe extern "C" fn metaroce_planes_change(
    raw: *mut bindings::ib_device,
    change: bindings::metaroce_plane_change,
    text: *const c_char,
    len: usize,
) -> c_int {
    from_result(|| {
        let change = match change {
            bindings::metaroce_plane_change_METAROCE_PLANE_ADD => Change::Add,
            bindings::metaroce_plane_change_METAROCE_PLANE_DEL => Change::Delete,
            bindings::metaroce_plane_change_METAROCE_PLANE_DRAIN => Change::Drain,
            bindings::metaroce_plane_change_METAROCE_PLANE_RESUME => Change::Resume,
            _ => return Err(EINVAL),
        };
        // SAFETY: Guaranteed by the caller.
        let (device, text) = unsafe {
            (
                ib::device_of::<Driver>(raw),
                slice::from_raw_parts(text.cast::<u8>(), len),
            )
        };
        device.change_planes(change, text)?;
        Ok(0)
    })
}

/// The list is read, into `room` bytes at `text`. How many bytes there are.
///
/// # Safety
///
/// Called by the file alone: `raw` is a device of this driver that is not deallocated meanwhile,
/// `text` has `room` bytes.
#[no_mangle]
unsafe extern "C" fn metaroce_planes_show(
    raw: *mut bindings::ib_device,
    text: *mut c_char,
    room: usize,
) -> isize {
    // SAFETY: Guaranteed by the caller.
    unsafe { show(raw, text, room, |device, out| device.show_planes(out)) }
}

/// A controller was written.
///
/// # Safety
///
/// Called by the file alone: `raw` is a device of this driver that is not deallocated meanwhile,
/// `text` has `len` bytes.
#[no_mangle]
unsafe extern "C" fn metaroce_controller_choose(
    raw: *mut bindings::ib_device,
    text: *const c_char,
    len: usize,
) -> c_int {
    from_result(|| {
        // SAFETY: Guaranteed by the caller.
        let (device, text) = unsafe {
            (
                ib::device_of::<Driver>(raw),
                slice::from_raw_parts(text.cast::<u8>(), len),
            )
        };
        device.choose_controller(text)?;
        Ok(0)
    })
}

/// The controllers are read, into `room` bytes at `text`. How many bytes there are.
///
/// # Safety
///
/// As for [`metaroce_planes_show`].
#[no_mangle]
unsafe extern "C" fn metaroce_controller_show(
    raw: *mut bindings::ib_device,
    text: *mut c_char,
    room: usize,
) -> isize {
    // SAFETY: Guaranteed by the caller.
    unsafe { show(raw, text, room, |device, out| device.show_controller(out)) }
}

/// Lets `write` write a few short lines, which fit. How many bytes they are.
///
/// # Safety
///
/// As for [`metaroce_planes_show`].
unsafe fn show(
    raw: *mut bindings::ib_device,
    text: *mut c_char,
    room: usize,
    write: impl FnOnce(&Driver, &mut dyn Write) -> fmt::Result,
) -> isize {
    // SAFETY: Guaranteed by the caller.
    let (device, text) = unsafe {
        (
            ib::device_of::<Driver>(raw),
            slice::from_raw_parts_mut(text.cast::<u8>(), room),
        )
    };
    if let Some(mut out) = NullTerminatedFormatter::new(&mut *text) {
        let _ = write(device, &mut out);
    }
    text.iter().take_while(|b| **b != 0).count() as isize
}
