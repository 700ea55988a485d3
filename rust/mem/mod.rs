// SPDX-License-Identifier: GPL-2.0

//! Registered memory: every byte that touches user pages passes here.
//!
//! # Who holds a region, and how deregistration waits
//!
//! A [`Region`] is found by its key in the device's [`Table`], under RCU, and used through
//! a [`RegionRef`], which counts as "busy". References live for one copy or one look-up, or
//! for one batch of packets ([`Recent`]), never while something waits for the peer: a WR and a
//! READ response look their key up again in each batch. Deregistration takes the key out of the
//! table, marks the region dead, sleeps until the busy count is zero, and then unpins the pages.
//! Packets on their way out hold page references of their own (see [`Frags`]).
//!
//! # Refusals
//!
//! An unknown or dead key, another PD, missing rights and a range outside the region are
//! all [`Refused`]: the caller turns it into the status of its side.

mod copy;
mod frags;
mod pinned;
mod table;

pub use self::{
    copy::{check_list, gather, Atomic, Bytes, Scatter, MAX_SGE},
    frags::{Frags, PageRef, MAX_INLINE},
    pinned::Pinned,
    table::{Recent, RegionInit, Registration, Table, MAX_REGIONS},
};

/// Rights of a region and needs of an access; the values of `enum ib_access_flags`.
pub mod access {
    /// The owner's QPs may write.
    pub const LOCAL_WRITE: u32 = 1 << 0;
    /// Peers may write.
    pub const REMOTE_WRITE: u32 = 1 << 1;
    /// Peers may read.
    pub const REMOTE_READ: u32 = 1 << 2;
    /// Peers may do atomics.
    pub const REMOTE_ATOMIC: u32 = 1 << 3;
    /// Peers may do anything.
    pub const REMOTE: u32 = REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC;
    /// Windows may be bound to it.
    pub const MW_BIND: u32 = 1 << 4;
    /// Addresses count from the region's start.
    pub const ZERO_BASED: u32 = 1 << 5;
    /// Pages are faulted in when needed.
    pub const ON_DEMAND: u32 = 1 << 6;
    /// The pages are huge ones (a hint).
    pub const HUGETLB: u32 = 1 << 7;
    /// Nobody looks at the data before its completion.
    pub const RELAXED_ORDERING: u32 = 1 << 20;
    /// Flags that a device may ignore.
    pub const OPTIONAL: u32 = 0x3ff0_0000;
}

/// The key, its PD, the rights or the range do not allow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// One piece of a gather or scatter list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    /// Address in the region's own address space.
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// The region's key.
    pub lkey: u32,
}
