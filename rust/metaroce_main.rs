// SPDX-License-Identifier: GPL-2.0

//! metaroce: RDMA verbs over any Ethernet interface, in MetaRoCE packets (multipath, lossy
//! Ethernet, over UDP).

//!
//! | folder | what |
//! | --- | --- |
//! | `proto` | the transport, without I/O; compiled by cargo as well |
//! | `verbs` | one file per verbs object |
//! | `net` | UDP ports, routes, sending, receiving |
//! | `mem`, `queue` | registered memory; rings shared with programs |
//! | `drive` | the one place that locks a connection and moves it on |
//! | `kernel_ext`, `bindings` | safe wrappers for what the `kernel` crate lacks |
//!
//! Start order: UDP ports, then the link type; the end comes in reverse.
//!
//! # Refused parameters
//!
//! `modprobe` fails with EINVAL, and a line in the kernel log says what may be chosen:
//!
//! | parameter | refused | line |
//! | --- | --- | --- |
//! | `port` | 0 | `port=0: choose a UDP port from 1 to 65535` |
//! | `paths` | 0, above 64 | `paths=N: choose from 1 to 64` |
//! | each | no number, one too large for its type (`crc`: not y, n, 1, 0, on, off), given twice | the kernel's: VALUE invalid for parameter NAME |

use ::kernel::prelude::*;

#[allow(dead_code)]
mod bindings;
pub mod drive;
pub mod kernel_ext;
pub mod mem;
pub mod net;
pub mod os;
pub mod proto;
pub mod queue;
pub mod verbs;

module! {
    type: Metaroce,
    name: "metaroce",
    authors: ["The metaroce authors"],
    description: "RDMA over multipath, lossy Ethernet (MetaRoCE wire version 0, experimental)",
    license: "GPL",
    alias: ["rdma-link-metaroce"],
    params: {
        port: u16 {
            default: 4795,
            description: "UDP port of the transport (1 to 65535, default 4795), the same on all hosts",
        },
        paths: u8 {
            default: 16,
            description: "Paths of a connection (1 to 64, default 16)",
        },
        crc: bool {
            default: true,
            description: "CRC32C over header and payload of each packet (default on; off only where both ends say so)",
        },
        seed: u64 {
            default: 0,
            description: "Seed of source ports and of choices among paths, to repeat a run (default 0: random)",
        },
    },
}

/// What lives as long as the module; fields go in this order.
pub struct Metaroce {
    _links: Pin<KBox<kernel_ext::ib::LinkType<verbs::device::Driver>>>,
    _network: net::Network,
}

impl ::kernel::Module for Metaroce {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        let port = module_parameters::port.value();
        let paths = module_parameters::paths.value();
        if port == 0 {
            pr_err!("port=0: choose a UDP port from 1 to 65535\n");
            return Err(EINVAL);
        }
        if !(1..=64).contains(&paths) {
            pr_err!("paths={}: choose from 1 to 64\n", paths);
            return Err(EINVAL);
        }
        let network = net::start(port)?;
        let links = verbs::link::start(verbs::link::Params {
            paths,
            crc: module_parameters::crc.value(),
            seed: module_parameters::seed.value(),
        })?;
        Ok(Self {
            _links: links,
            _network: network,
        })
    }
}
