// SPDX-License-Identifier: GPL-2.0

//! `rdma link add NAME type metaroce netdev DEV`, and the end of it.
//!
//! A device is made over one Ethernet-like netdev: NIC, virtio, veth, VLAN, bond, bridge,
//! macvlan. It lives in the netdev's namespace (exclusive mode of the RDMA core; in shared
//! mode the core keeps all devices in the first namespace). It goes with `rdma link delete`,
//! with the netdev (also when that moves to another namespace), or with the module.
//!
//! The RDMA core finds the addresses of a VLAN at the netdev below it: of a device over a VLAN
//! it names that netdev (`rdma link`), and complains in the kernel log of each address there
//! that the device does not take. The addresses of VLANs are also among those of a device over
//! the netdev below.
//!
//! `rdma link add` has no way to hand a text back, so each refusal is one line in the kernel
//! log beside its errno:
//!
//! | refusal | errno |
//! | --- | --- |
//! | not an Ethernet-like netdev | EINVAL |
//! | the netdev has a device already, or is a plane of one | EEXIST |
//! | the name is in use | ENFILE (from the RDMA core) |
//! | another program has the UDP port | EADDRINUSE |
//! | the netdev is going, also to another namespace, or the module is | ENODEV |
//! | no memory | ENOMEM |
//!
//! Of a name in use and a netdev that does not exist `rdma` may speak by itself, before the
//! module is asked.

#![forbid(unsafe_code)]

use super::device::{DeviceInner, Driver};
use crate::{
    kernel_ext::{
        ib::{self, Link, LinkType},
        net::NetDev,
    },
    queue::{GUID_MARK, GUID_MASK},
};
use ::kernel::{prelude::*, sync::SetOnce};

/// Parameters of the module that concern devices.
#[derive(Clone, Copy)]
pub struct Params {
    /// Paths of a connection, 1 to 64.
    pub paths: u8,
    /// Ask for a CRC in every packet.
    pub crc: bool,
    /// Where path entropy comes from; 0 is random.
    pub seed: u64,
}

static PARAMS: SetOnce<Params> = SetOnce::new();

/// Registers the link type; dropping what is returned removes all devices. Once, when the
/// module is loaded.
pub fn start(params: Params) -> Result<Pin<KBox<LinkType<Driver>>>> {
    PARAMS.populate(params);
    KBox::pin_init(LinkType::new(), GFP_KERNEL)
}

/// Node GUID of the device over the netdev with this MAC address (48 bits) and index: the
/// same whenever it is made again.
///
/// A VLAN, bond or bridge has the address of what is below it, so the index counts as well.
/// The factor is odd: of two equal addresses the GUIDs differ wherever the lower halves of
/// the indexes do. Other pairs are spread over all 40 bits behind the mark.
fn node_guid(mac: u64, index: u32) -> u64 {
    let netdev = (mac ^ (u64::from(index) << 48)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    GUID_MARK | ((netdev >> 24) & !GUID_MASK)
}

impl Link for Driver {
    const TYPE: &'static CStr = c"metaroce";

    fn new_link(name: &CStr, netdev: &NetDev) -> Result {
        let params = *PARAMS.as_ref().ok_or(ENODEV)?;
        if !netdev.is_ether() {
            pr_err!(
                "{}: not an Ethernet-like interface, no device can be made over it\n",
                netdev.name()
            );
            return Err(EINVAL);
        }
        if ib::has_link::<Driver>(netdev) {
            pr_err!("{}: has a metaroce device already\n", netdev.name());
            return Err(EEXIST);
        }
        let guid = node_guid(netdev.mac(), netdev.index());
        ib::add_link::<Driver>(netdev, name, guid, |back, net| {
            DeviceInner::open(back, netdev, net, guid, params)
        })
        .inspect_err(|e| {
            // Of the UDP port the network has told already.
            if *e == EEXIST {
                pr_err!("{}: is a plane of a metaroce device\n", netdev.name());
            } else if *e != EADDRINUSE {
                pr_err!(
                    "{}: cannot make device {}: error {}\n",
                    netdev.name(),
                    name,
                    e.to_errno()
                );
            }
        })
    }
}
