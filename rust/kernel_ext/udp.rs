// SPDX-License-Identifier: GPL-2.0

//! A UDP port of a network namespace whose packets come to us before any socket queue.
//!
//! C header: `include/net/udp_tunnel.h`.

use super::{
    net::{ipv6_enabled, DevRef, NetId},
    skb::{Skb, UDP_LEN},
};
use crate::bindings;
use ::core::{marker::PhantomData, ptr, ptr::NonNull};
use ::kernel::{
    error::to_result,
    prelude::*,
    sync::{rcu, Arc},
};

/// What packets of a [`UdpPort`] are given to.
pub trait Encap: Send + Sync + 'static {
    /// A packet came in by `device`. Softirq, under the RCU read lock; a few microseconds at
    /// the most.
    fn receive(&self, skb: Skb, device: Option<DevRef<'_>>);
}

/// The open port: an IPv4 socket, and an IPv6 one on machines that speak IPv6. Closed when
/// dropped (sleeps); after that `Encap::receive` is not running and not called any more.
pub struct UdpPort<T: Encap> {
    net: NetId,
    v4: NonNull<bindings::sock>,
    v6: Option<NonNull<bindings::sock>>,
    /// One reference of `encap`, which the sockets point to.
    encap: *const T,
    _owns: PhantomData<Arc<T>>,
}

// SAFETY: The sockets may be used and closed by every thread; `T` is `Send + Sync`.
unsafe impl<T: Encap> Send for UdpPort<T> {}
// SAFETY: As above.
unsafe impl<T: Encap> Sync for UdpPort<T> {}

impl<T: Encap> UdpPort<T> {
    /// Opens `port` on every address of `net`, which lives as long as the result. Errors:
    /// EADDRINUSE, ENOMEM. Sleeps.
    pub fn open(net: NetId, port: u16, encap: Arc<T>) -> Result<Self> {
        let v4 = create(net, port, false)?;
        let v6 = if ipv6_enabled() {
            match create(net, port, true) {
                Ok(sock) => Some(sock),
                Err(e) => {
                    // SAFETY: Made above, and nobody else has it.
                    unsafe { bindings::udp_tunnel_sock_release(v4.as_ptr()) };
                    return Err(e);
                }
            }
        } else {
            None
        };
        let encap = Arc::into_raw(encap);
        for sock in [Some(v4), v6].into_iter().flatten() {
            let mut cfg = bindings::udp_tunnel_sock_cfg {
                sk_user_data: encap.cast_mut().cast(),
                encap_type: 1,
                encap_rcv: Some(encap_rcv::<T>),
                ..Default::default()
            };
            // SAFETY: The socket is ours. What it points to outlives it: `drop` closes the
            // socket, waits, and then drops `encap`.
            unsafe {
                bindings::setup_udp_tunnel_sock(net.as_ptr(), sock.as_ptr(), &mut cfg);
                bindings::metaroce_set_pmtudisc_probe(sock.as_ptr());
            }
        }
        Ok(Self {
            net,
            v4,
            v6,
            encap,
            _owns: PhantomData,
        })
    }

    /// The socket to send IPv6 or IPv4 by, while the port is open.
    pub fn sock(&self, ipv6: bool) -> Option<Sock<'_>> {
        Some(Sock {
            sock: if ipv6 { self.v6? } else { self.v4 },
            net: self.net,
            _port: PhantomData,
        })
    }
}

impl<T: Encap> Drop for UdpPort<T> {
    fn drop(&mut self) {
        for sock in [Some(self.v4), self.v6].into_iter().flatten() {
            // SAFETY: The socket is ours and open.
            unsafe { bindings::udp_tunnel_sock_release(sock.as_ptr()) };
        }
        // SAFETY: May be called in every context that may sleep.
        unsafe { bindings::synchronize_net() };
        // SAFETY: From `Arc::into_raw` in `open`; no handler is left that could use it.
        drop(unsafe { Arc::from_raw(self.encap) });
    }
}

/// One socket of an open [`UdpPort`].
#[derive(Clone, Copy)]
pub struct Sock<'a> {
    sock: NonNull<bindings::sock>,
    net: NetId,
    _port: PhantomData<&'a ()>,
}

impl Sock<'_> {
    /// The C object.
    pub(super) fn as_ptr(self) -> *mut bindings::sock {
        self.sock.as_ptr()
    }

    /// Its namespace.
    pub(super) fn net(self) -> NetId {
        self.net
    }
}

fn create(net: NetId, port: u16, ipv6: bool) -> Result<NonNull<bindings::sock>> {
    let mut cfg = bindings::udp_port_cfg {
        local_udp_port: port.to_be(),
        ..Default::default()
    };
    // IPv6 packets may come without UDP checksum: they have a CRC of their own.
    cfg.set_use_udp6_tx_checksums(0);
    cfg.set_use_udp6_rx_checksums(0);
    cfg.set_use_udp_checksums(1);
    cfg.set_ipv6_v6only(1);
    let mut socket = ptr::null_mut();
    // SAFETY: `cfg` and `socket` are valid during the call, and the namespace lives.
    to_result(unsafe {
        if ipv6 {
            cfg.family = bindings::AF_INET6;
            bindings::udp_sock_create6(net.as_ptr(), &mut cfg, &mut socket)
        } else {
            cfg.family = bindings::AF_INET;
            bindings::udp_sock_create4(net.as_ptr(), &mut cfg, &mut socket)
        }
    })?;
    // SAFETY: The call succeeded, so `socket` is a socket with a `sock`.
    NonNull::new(unsafe { bindings::metaroce_socket_sk(socket) }).ok_or(EINVAL)
}

/// # Safety
///
/// Only called by the kernel, for the sockets of a `UdpPort<T>`; `skb` passes to it.
unsafe extern "C" fn encap_rcv<T: Encap>(
    sk: *mut bindings::sock,
    skb: *mut bindings::sk_buff,
) -> c_int {
    let guard = rcu::read_lock();
    // SAFETY: A socket that receives is alive.
    let encap: *const T = unsafe { bindings::metaroce_sk_user_data(sk) }.cast();
    // SAFETY: Not null means: not freed before a grace period has passed.
    let (Some(encap), Some(skb)) = (unsafe { encap.as_ref() }, NonNull::new(skb)) else {
        // The port is just closing: UDP may do with the packet what it likes.
        return 1;
    };
    // SAFETY: The packet is ours from here on. UDP has made its header linear, checked the
    // length, and left `data` at it; route, socket and destructor go.
    let mut skb = unsafe {
        bindings::metaroce_skb_dst_drop(skb.as_ptr());
        bindings::metaroce_skb_orphan(skb.as_ptr());
        bindings::metaroce_skb_pull(skb.as_ptr(), UDP_LEN);
        Skb::from_raw(skb)
    };
    let device = skb.take_device(&guard);
    encap.receive(skb, device);
    0
}
