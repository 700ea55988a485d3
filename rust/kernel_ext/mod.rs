// SPDX-License-Identifier: GPL-2.0

//! Safe wrappers for what the `kernel` crate lacks, one file per C subsystem.

pub mod bh;
pub mod crc;
pub mod dst;
pub mod ib;
pub mod ib_attr;
pub mod ib_dv;
pub mod ib_planes;
pub mod ids;
#[cfg(CONFIG_KUNIT = "y")]
mod kunit;
pub mod lend;
pub mod net;
pub mod rcu;
pub mod restrack;
pub mod skb;
pub mod timer;
pub mod udp;
