// SPDX-License-Identifier: GPL-2.0

//! The port of a device: what the netdev below it makes of it.
//!
//! A query always succeeds; without a netdev the port is down.

#![forbid(unsafe_code)]

use crate::{
    kernel_ext::{ib_attr::PortAttr, net::NetDev},
    proto::api::{DATA_OVERHEAD, MAX_MESSAGE},
};

/// GIDs of a port at the most.
pub const GIDS: u32 = 1024;

/// Bytes of IPv4 and UDP headers. (With IPv6 a path carries 20 bytes less than `enum ib_mtu`
/// says; packets are cut by what a path really carries.)
const HEADERS: u32 = 20 + 8;

/// `enum ib_mtu` of the greatest payload (a power of two from 256 to 4096) that fits into
/// packets of `netdev_mtu` bytes; 256 at least.
pub fn active_mtu(netdev_mtu: u32) -> u32 {
    let room = netdev_mtu.saturating_sub(HEADERS + DATA_OVERHEAD as u32);
    match room {
        4096.. => 5,
        2048.. => 4,
        1024.. => 3,
        512.. => 2,
        _ => 1,
    }
}

/// What the port is now, `active` as long as one of its planes works; without a netdev (it is
/// going) it is down.
pub fn query(netdev: Option<&NetDev>, speed: u32, active: bool) -> PortAttr {
    let mtu = netdev.map_or(0, |n| n.mtu());
    PortAttr {
        active: netdev.is_some() && active,
        netdev_mtu: mtu,
        active_mtu: active_mtu(mtu),
        gid_tbl_len: GIDS,
        max_msg_size: MAX_MESSAGE,
        speed,
    }
}
