// SPDX-License-Identifier: GPL-2.0

//! The planes of a device, as the administrator has them:
//! `/sys/class/infiniband/NAME/planes`.
//!
//! | file | written or read |
//! | --- | --- |
//! | `add` | `NETDEV [ID]`: a further plane, under the lowest id that is free |
//! | `del` | `NETDEV`: it is none any more, at once |
//! | `drain` | `NETDEV`: it gets nothing new |
//! | `resume` | `NETDEV`: it is used again |
//! | `list` | a line for each: `ID NETDEV STATE ADDRESS...` |
//! | `controller` | the name of what the windows of new connections do, on whichever plane; read: all names, that one in brackets |
//!
//! The RDMA core asks new drivers for netlink instead of files of their own; but the `rdma` tool
//! knows no commands of a driver, and files need no tool. They are in the namespaces in which
//! the device is, go with it, and want CAP_NET_ADMIN. Netdevs are looked for in the namespace of
//! the device's own.
//!
//! | refusal | errno |
//! | --- | --- |
//! | without CAP_NET_ADMIN | EPERM (root without it), EACCES (others) |
//! | no word, too many, no number, an id above 7, a netdev that is not Ethernet-like | EINVAL |
//! | no such netdev in the namespace, or the device is going | ENODEV |
//! | `add`: the netdev has a device or is a plane, or the id is taken | EEXIST |
//! | `add`: there are eight | ENOSPC |
//! | others: the netdev is no plane of the device | ENOENT |
//! | `del`: the device's own netdev | EBUSY |
//! | `controller`: no name of one | EINVAL |

#![forbid(unsafe_code)]

use super::device::DeviceInner;
use crate::{
    kernel_ext::{ib_planes::Change, net::ipv4_of},
    net::{PlaneUse, Planes},
    proto::congestion::Controller,
};
use ::core::{
    fmt::{self, Write},
    net::{Ipv4Addr, Ipv6Addr},
};
use ::kernel::prelude::*;

/// Bytes of a netdev's name at the most, with the zero behind it.
const NAME: usize = 16;

/// A change, with the netdev's name.
pub(super) enum Order<'a> {
    /// Adds it, under an id or the lowest one that is free.
    Add(&'a CStr, Option<u8>),
    /// Removes it.
    Remove(&'a CStr),
    /// Lets it drain, or uses it again.
    Drain(&'a CStr, bool),
}

/// Does what was written.
pub(super) fn change(device: &DeviceInner, change: Change, text: &[u8]) -> Result {
    let mut words = text
        .split(u8::is_ascii_whitespace)
        .filter(|word| !word.is_empty());
    let word = words.next().ok_or(EINVAL)?;
    let mut name = [0u8; NAME];
    let with_zero = name.get_mut(..=word.len()).ok_or(EINVAL)?;
    for (to, from) in with_zero.iter_mut().zip(word) {
        *to = *from;
    }
    let name = CStr::from_bytes_with_nul(with_zero).map_err(|_| EINVAL)?;
    let id = match (words.next(), change) {
        (None, _) => None,
        (Some([digit @ b'0'..=b'9']), Change::Add) => Some(digit - b'0'),
        _ => return Err(EINVAL),
    };
    if words.next().is_some() {
        return Err(EINVAL);
    }
    device.change_planes(match change {
        Change::Add => Order::Add(name, id),
        Change::Delete => Order::Remove(name),
        Change::Drain => Order::Drain(name, true),
        Change::Resume => Order::Drain(name, false),
    })
}

/// Takes the controller that was written.
pub(super) fn choose_controller(device: &DeviceInner, text: &[u8]) -> Result {
    let name = text.trim_ascii();
    let named = |c: &Controller| c.name().as_bytes() == name;
    device.set_controller(Controller::ALL.into_iter().find(named).ok_or(EINVAL)?);
    Ok(())
}

/// Writes the controllers.
pub(super) fn show_controller(device: &DeviceInner, out: &mut dyn Write) -> fmt::Result {
    let chosen = device.controller();
    for (i, c) in Controller::ALL.into_iter().enumerate() {
        let space = if i == 0 { "" } else { " " };
        if c == chosen {
            write!(out, "{space}[{}]", c.name())?;
        } else {
            write!(out, "{space}{}", c.name())?;
        }
    }
    out.write_char('\n')
}

/// Writes what is read.
pub(super) fn show(device: &DeviceInner, out: &mut dyn Write) -> fmt::Result {
    let planes = device.port.planes();
    for (id, plane) in planes.iter().flat_map(Planes::iter) {
        let state = match plane.state() {
            PlaneUse::Up => "up",
            PlaneUse::Down => "down",
            PlaneUse::NoAddress => "no-address",
            PlaneUse::Draining => "draining",
        };
        out.write_fmt(fmt!("{} {} {}", id, plane.name(), state))?;
        for gid in [plane.address(false), plane.address(true)]
            .into_iter()
            .flatten()
        {
            match ipv4_of(gid) {
                Some(v4) => write!(out, " {}", Ipv4Addr::from(v4))?,
                None => write!(out, " {}", Ipv6Addr::from(*gid))?,
            }
        }
        out.write_char('\n')?;
    }
    Ok(())
}
