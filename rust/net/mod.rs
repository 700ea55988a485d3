// SPDX-License-Identifier: GPL-2.0

//! The network below the devices: ports, receiving, routes, sending.
//!
//! # Receiving
//!
//! Each network namespace in which a device lives has one UDP port, the service port, open
//! on all its addresses ([`port`]). Packets reach [`Client::receive`] of their device in
//! softirq, before any socket queue: one call per packet, on the CPU that the network chose.
//! A received packet refers to no route, netdev or socket and may be kept.
//!
//! # Sending
//!
//! A [`Flow`] sends the packets of one connection: it finds a route for each path (the
//! source port may decide it, as with ECMP), makes one `sk_buff` with a header of its own
//! and the payload's pages behind it, and hands it to the IP stack, whose queues may refuse
//! it. Nothing is queued here.
//!
//! # Who holds what, and how closing waits
//!
//! A [`Port`] is a device's place in the network. It is open while its [`port::Link`] is
//! published under RCU; the link holds the netdev, the namespace's UDP port and the client.
//! [`Port::close`], and the netdev's unregistration, take the link away and wait for a
//! grace period: after that no packet is received for the device or sent by it any more, and
//! when it was the last one the namespace's UDP port is closed. A [`Flow`] whose port is
//! closed refuses to send, and gives up its routes ([`Client::closed`]).
//!
//! A device may have further netdevs, its planes ([`planes`]): a packet that comes in by one of
//! them is the device's, and a [`Flow`] sends over the one that the packet names ([`Leg`]).
//!
//! Locks: RTNL → the list of namespaces ([`port`]). Both are taken in process context only.
//! A flow's routes have a spinlock that orders after every other lock.

#![forbid(unsafe_code)]

mod flow;
mod planes;
mod port;

pub use self::{
    flow::{Flow, FlowInit, Leg},
    planes::{PlaneUse, Planes},
    port::{is_of_this_machine, new_instance, start, Client, Network, Port},
};
pub use crate::kernel_ext::{
    net::{random_u64, NetDev, NetdevEvent},
    skb::{Skb, SkbQueue, XmitError},
    timer::now,
};
