// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#![forbid(unsafe_code)]

//! What the kernel module and this library share, made from `uapi/rdma/metaroce-abi.h`.
//!
//! bindgen's own asserts say that it laid the structures out as C does; `layout` pins the numbers,
//! for module and plugin alike.

mod bindings {
    #![allow(missing_docs, non_camel_case_types, dead_code)]
    #![allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
    include!(concat!(env!("OUT_DIR"), "/abi.rs"));
}
pub(crate) use bindings::*;

// Formatted where its other user is at home.
#[rustfmt::skip]
#[path = "../../uapi/rdma/layout.rs"]
mod layout;

/// The ABI versions that this library speaks, lowest and highest.
pub(crate) const ABI_VERSIONS: core::ops::RangeInclusive<u32> = METAROCE_ABI_VERSION..=METAROCE_ABI_VERSION;

/// Bytes from the start of an SQ slot to its SGEs or inline bytes.
pub(crate) const SEND_WQE: usize = size_of::<metaroce_send_wqe>();

/// Bytes from the start of an RQ slot to its SGEs.
pub(crate) const RECV_WQE: usize = size_of::<metaroce_recv_wqe>();

/// Bytes of an SGE.
pub(crate) const SGE: usize = size_of::<metaroce_sge>();

#[cfg(test)]
mod tests {
    /// A new structure is pinned, too.
    #[test]
    fn the_layout_of_every_struct_of_the_header_is_pinned() {
        let header = include_str!("../../uapi/rdma/metaroce-abi.h");
        let layout = include_str!("../../uapi/rdma/layout.rs");
        let of_header = header.lines().filter_map(|line| line.strip_prefix("struct ")?.strip_suffix(" {"));
        let pinned =
            layout.lines().filter_map(|line| Some(line.strip_prefix("    metaroce_")?.split_once(": ")?.0));
        let of_header: Vec<_> = of_header.collect();
        assert!(!of_header.is_empty());
        assert_eq!(of_header, pinned.map(|name| format!("metaroce_{name}")).collect::<Vec<_>>());
    }
}
