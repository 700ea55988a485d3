// SPDX-License-Identifier: GPL-2.0

//! Routes.
//!
//! C header: `include/net/dst.h`.

use super::net::{in6, ipv4_of, NetId};
use crate::bindings;
use ::core::{marker::PhantomData, ptr::NonNull};
use ::kernel::{error::to_result, prelude::*, sync::rcu};

/// What a route is looked up by.
#[derive(Clone, Copy)]
pub struct FlowKey {
    /// GIDs of both ends, of one family.
    pub source: [u8; 16],
    /// See `source`.
    pub destination: [u8; 16],
    /// Type of service or traffic class.
    pub class: u8,
    /// IPv6 flow label.
    pub flow_label: u32,
    /// UDP ports, for hashes over ports.
    pub source_port: u16,
    /// See `source_port`.
    pub destination_port: u16,
    /// Index of the interface to leave by; 0 for any.
    pub interface: u32,
}

/// A reference to a route.
pub struct Dst {
    dst: NonNull<bindings::dst_entry>,
    cookie: u32,
}

// SAFETY: A reference to a route may be used and dropped on every CPU.
unsafe impl Send for Dst {}
// SAFETY: As above.
unsafe impl Sync for Dst {}

impl Dst {
    /// Looks a route up. Any context; `net` lives.
    pub fn lookup(net: NetId, key: &FlowKey) -> Result<Self> {
        match (ipv4_of(&key.source), ipv4_of(&key.destination)) {
            (Some(source), Some(destination)) => Self::lookup4(net, key, source, destination),
            (None, None) => Self::lookup6(net, key),
            _ => Err(EAFNOSUPPORT),
        }
    }

    fn lookup4(net: NetId, key: &FlowKey, source: [u8; 4], destination: [u8; 4]) -> Result<Self> {
        let mut flow = bindings::flowi4::default();
        flow.__fl_common.flowic_oif = key.interface as i32;
        flow.__fl_common.flowic_proto = bindings::IPPROTO_UDP as u8;
        flow.__fl_common.flowic_dscp = key.class & !3;
        flow.saddr = u32::from_ne_bytes(source);
        flow.daddr = u32::from_ne_bytes(destination);
        flow.uli.ports.sport = key.source_port.to_be();
        flow.uli.ports.dport = key.destination_port.to_be();
        // SAFETY: `flow` is valid during the call, and `net` lives.
        let rt =
            unsafe { bindings::ip_route_output_flow(net.as_ptr(), &mut flow, ::core::ptr::null()) };
        // `dst` is the first field of a `rtable`.
        // SAFETY: The call returned a reference or an error pointer.
        unsafe { Self::from_result(rt.cast(), 0) }
    }

    fn lookup6(net: NetId, key: &FlowKey) -> Result<Self> {
        let mut flow = bindings::flowi6::default();
        flow.__fl_common.flowic_oif = key.interface as i32;
        flow.__fl_common.flowic_proto = bindings::IPPROTO_UDP as u8;
        flow.saddr = in6(&key.source);
        flow.daddr = in6(&key.destination);
        flow.flowlabel = (u32::from(key.class) << 20 | key.flow_label & 0xf_ffff).to_be();
        flow.uli.ports.sport = key.source_port.to_be();
        flow.uli.ports.dport = key.destination_port.to_be();
        // SAFETY: `flow` is valid during the call, and `net` lives. Without a final
        // destination.
        let dst = unsafe {
            bindings::ip6_dst_lookup_flow(
                net.as_ptr(),
                ::core::ptr::null(),
                &mut flow,
                ::core::ptr::null(),
            )
        };
        // SAFETY: The call returned a reference or an error pointer.
        let mut found = unsafe { Self::from_result(dst, 0)? };
        // SAFETY: An IPv6 route is a `rt6_info`.
        found.cookie = unsafe { bindings::metaroce_rt6_get_cookie(found.dst.as_ptr()) };
        Ok(found)
    }

    /// # Safety
    ///
    /// `dst` is an error pointer, or a reference that passes to the result.
    unsafe fn from_result(dst: *mut bindings::dst_entry, cookie: u32) -> Result<Self> {
        let code = dst as isize;
        if (-4095..0).contains(&code) {
            to_result(code as i32)?;
        }
        let found = Self {
            dst: NonNull::new(dst).ok_or(EHOSTUNREACH)?,
            cookie,
        };
        // SAFETY: `found` holds a reference.
        to_result(unsafe { found.dst.as_ref() }.error.into())?;
        Ok(found)
    }

    /// Whether it is still the route to take.
    pub fn is_valid(&self) -> bool {
        // SAFETY: `self` holds a reference.
        unsafe { bindings::metaroce_dst_check(self.dst.as_ptr(), self.cookie) }
    }

    /// The route for use until the RCU read lock is released, even when `self` goes
    /// earlier.
    pub fn borrow<'a>(&self, _guard: &'a rcu::Guard) -> DstRef<'a> {
        DstRef {
            dst: self.dst,
            _guard: PhantomData,
        }
    }
}

impl Drop for Dst {
    fn drop(&mut self) {
        // SAFETY: `self` owns one reference.
        unsafe { bindings::dst_release(self.dst.as_ptr()) };
    }
}

/// A route under the RCU read lock: routes are freed after a grace period.
#[derive(Clone, Copy)]
pub struct DstRef<'a> {
    dst: NonNull<bindings::dst_entry>,
    _guard: PhantomData<&'a rcu::Guard>,
}

impl DstRef<'_> {
    /// The C object.
    pub(super) fn as_ptr(self) -> *mut bindings::dst_entry {
        self.dst.as_ptr()
    }

    /// Bytes to leave free in front of the IP header.
    pub fn headroom(self) -> u32 {
        // SAFETY: The route lives (type invariant), and so does its device.
        unsafe { bindings::metaroce_dst_headroom(self.dst.as_ptr()) }
    }

    /// MTU of the interface that it leaves by, in bytes.
    pub fn interface_mtu(self) -> u32 {
        // SAFETY: As above.
        unsafe { bindings::metaroce_dst_dev_mtu(self.dst.as_ptr()) }
    }

    /// Index of the interface that it leaves by.
    pub fn interface(self) -> u32 {
        // SAFETY: As above.
        unsafe { bindings::metaroce_dst_dev_index(self.dst.as_ptr()) }
    }

    /// Whether the destination is this host.
    pub fn is_local(self) -> bool {
        // SAFETY: As above.
        unsafe { bindings::metaroce_dst_is_loopback(self.dst.as_ptr()) }
    }
}
