// SPDX-License-Identifier: GPL-2.0

//! metaroce: RDMA verbs over any Ethernet interface, in MetaRoCE packets (multipath, lossy
//! Ethernet, over UDP).

use ::kernel::prelude::*;

#[allow(dead_code)]
mod bindings;

module! {
    type: Metaroce,
    name: "metaroce",
    authors: ["The metaroce authors"],
    description: "RDMA over multipath, lossy Ethernet (MetaRoCE wire version 0, experimental)",
    license: "GPL",
    alias: ["rdma-link-metaroce"],
}

struct Metaroce;

impl ::kernel::Module for Metaroce {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        Ok(Metaroce)
    }
}
