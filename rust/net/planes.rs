// SPDX-License-Identifier: GPL-2.0

//! The planes of a device: its own netdev, which is plane 0, and further ones.
//!
//! A device with one plane has no list of them ([`Link::planes`] is empty): packets neither
//! look for a plane nor pay for one. The list is replaced as a whole under RCU, by whoever
//! holds the list of namespaces.
//!
//! | who | what |
//! | --- | --- |
//! | the administrator | adds and removes planes, lets them drain |
//! | the netdev's unregistration | removes its plane; with plane 0 the device goes |
//! | links and addresses | decide whether a plane is used, and from which address |
//!
//! News about links and addresses may come in atomic context, and concern many devices: one
//! work item of the module ([`Shared`]) looks at all devices that have planes, and has those tell
//! their connections for which something has changed.
//!
//! [`Link::planes`]: super::port::Link::planes
//! [`Shared`]: super::port::Shared

#![forbid(unsafe_code)]

use super::NetDev;
use crate::{
    kernel_ext::net::{DevRef, Name},
    proto::wire::PLANES_MAX,
};
use ::kernel::{prelude::*, sync::rcu};

/// A plane of a device.
#[derive(Clone, PartialEq)]
pub struct Plane {
    pub(super) netdev: NetDev,
    /// Index of the netdev.
    pub(super) interface: u32,
    /// The netdev is a network card, or on one.
    pub(super) has_line: bool,
    /// The netdev is on, and its link works.
    up: bool,
    /// The administrator wants nothing new on it.
    pub(super) draining: bool,
    ipv4: Option<[u8; 16]>,
    ipv6: Option<[u8; 16]>,
}

/// Whether a plane can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneUse {
    /// It is.
    Up,
    /// The netdev is off, or its link does not work.
    Down,
    /// The netdev has no IP address.
    NoAddress,
    /// It gets nothing new.
    Draining,
}

impl Plane {
    fn new(netdev: NetDev, draining: bool) -> Self {
        let guard = rcu::read_lock();
        Self {
            interface: netdev.index(),
            has_line: netdev.has_line(),
            up: netdev.is_operational(),
            draining,
            ipv4: netdev.ipv4(&guard),
            ipv6: netdev.ipv6(&guard),
            netdev,
        }
    }

    /// Name of the netdev.
    pub fn name(&self) -> Name {
        self.netdev.name()
    }

    /// Its address of a family, as a GID.
    pub fn address(&self, ipv6: bool) -> Option<&[u8; 16]> {
        if ipv6 {
            self.ipv6.as_ref()
        } else {
            self.ipv4.as_ref()
        }
    }

    /// Rate of its line in Mbit/s; 0 is unknown. Process context without RTNL.
    pub fn speed(&self) -> u32 {
        if self.has_line {
            self.netdev.speed()
        } else {
            0
        }
    }

    /// Whether it works, as far as this end can tell.
    pub fn is_up(&self) -> bool {
        self.up
    }

    /// Whether it can be used.
    pub fn state(&self) -> PlaneUse {
        if !self.up {
            PlaneUse::Down
        } else if self.ipv4.is_none() && self.ipv6.is_none() {
            PlaneUse::NoAddress
        } else if self.draining {
            PlaneUse::Draining
        } else {
            PlaneUse::Up
        }
    }
}

/// The planes of a device, by their ids.
#[derive(Clone, PartialEq)]
pub struct Planes([Option<Plane>; PLANES_MAX]);

impl Planes {
    /// Those of a device that has one: `own`.
    pub(super) fn only(own: &NetDev) -> Self {
        let mut list = [const { None }; PLANES_MAX];
        if let Some(home) = list.first_mut() {
            *home = Some(Plane::new(own.clone(), false));
        }
        Self(list)
    }

    /// The same planes with links and addresses as they are now.
    pub(super) fn again(&self) -> Self {
        Self(::core::array::from_fn(|i| {
            let plane = self.0.get(i)?.as_ref()?;
            Some(Plane::new(plane.netdev.clone(), plane.draining))
        }))
    }

    /// Whether this is what a device without a list has.
    pub(super) fn is_plain(&self) -> bool {
        let mut more = self.0.iter().skip(1).flatten();
        more.next().is_none() && self.get(0).is_none_or(|home| !home.draining)
    }

    /// A plane.
    pub(super) fn get(&self, id: u8) -> Option<&Plane> {
        self.0.get(usize::from(id))?.as_ref()
    }

    /// All, with their ids.
    pub fn iter(&self) -> impl Iterator<Item = (u8, &Plane)> + '_ {
        (0..)
            .zip(self.0.iter())
            .filter_map(|(id, p)| Some((id, p.as_ref()?)))
    }

    /// Whether one of them is on `netdev`.
    pub(super) fn are_on(&self, netdev: &NetDev) -> bool {
        self.iter().any(|(_, p)| p.netdev == *netdev)
    }

    /// The plane of packets that come in by `device`: of its own netdev, or of one that carries
    /// it; the first one, when there is none.
    pub(super) fn of(&self, device: DevRef<'_>) -> u8 {
        self.on(device)
            .or_else(|| {
                let carries = |(_, p): &(u8, &Plane)| p.netdev.carries(device);
                Some(self.iter().find(carries)?.0)
            })
            .unwrap_or(0)
    }

    /// The plane on `device`.
    pub(super) fn on(&self, device: DevRef<'_>) -> Option<u8> {
        let here = |(_, p): &(u8, &Plane)| device.is(&p.netdev);
        Some(self.iter().find(here)?.0)
    }

    /// Adds one, under `id` or the lowest one that is free. EEXIST: it has that id, or a plane
    /// on that netdev; ENOSPC: it has all; EINVAL: there is no such id.
    pub(super) fn add(&mut self, netdev: NetDev, id: Option<u8>) -> Result<u8> {
        if self.are_on(&netdev) {
            return Err(EEXIST);
        }
        let id = match id {
            Some(id) => usize::from(id),
            None => self.0.iter().position(|p| p.is_none()).ok_or(ENOSPC)?,
        };
        let place = self.0.get_mut(id).ok_or(EINVAL)?;
        if place.is_some() {
            return Err(EEXIST);
        }
        *place = Some(Plane::new(netdev, false));
        Ok(id as u8)
    }

    /// Removes the one on `netdev`. ENOENT: there is none; EBUSY: it is the device's own.
    pub(super) fn remove(&mut self, netdev: &NetDev) -> Result {
        let on = |p: &Option<Plane>| p.as_ref().is_some_and(|p| p.netdev == *netdev);
        match self.0.iter().position(on).ok_or(ENOENT)? {
            0 => Err(EBUSY),
            id => {
                if let Some(place) = self.0.get_mut(id) {
                    *place = None;
                }
                Ok(())
            }
        }
    }

    /// Lets the one on `netdev` drain, or uses it again. ENOENT: there is none.
    pub(super) fn drain(&mut self, netdev: &NetDev, draining: bool) -> Result {
        let mut all = self.0.iter_mut().flatten();
        let plane = all.find(|p| p.netdev == *netdev).ok_or(ENOENT)?;
        plane.draining = draining;
        Ok(())
    }
}
