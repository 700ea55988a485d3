// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#![forbid(unsafe_code)]

//! What the kernel module and this library share, made from `uapi/rdma/metaroce-abi.h`.
//!
//! bindgen adds the asserts on size and offset of every field; below are the ones on what the
//! header promises about libibverbs' own values.

mod generated {
    #![allow(missing_docs, non_camel_case_types, dead_code)]
    #![allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
    include!(concat!(env!("OUT_DIR"), "/abi.rs"));
}
pub(crate) use generated::*;

/// The ABI versions that this library speaks, lowest and highest.
pub(crate) const ABI_VERSIONS: core::ops::RangeInclusive<u32> = METAROCE_ABI_VERSION..=METAROCE_ABI_VERSION;

/// Bytes from the start of an SQ slot to its SGEs or inline bytes.
pub(crate) const SEND_WQE: usize = size_of::<metaroce_send_wqe>();

/// Bytes from the start of an RQ slot to its SGEs.
pub(crate) const RECV_WQE: usize = size_of::<metaroce_recv_wqe>();

/// Bytes of an SGE.
pub(crate) const SGE: usize = size_of::<metaroce_sge>();

// Slots and their tails are copied as they are: the sizes have to be what the kernel side asserts.
const _: () = {
    assert!(size_of::<metaroce_ring>() == 256);
    assert!(SEND_WQE == 64);
    assert!(RECV_WQE == 16);
    assert!(SGE == 16);
    assert!(size_of::<metaroce_cqe>() == 64);
    assert!(size_of::<metaroce_alloc_ucontext_req>() == 16);
    assert!(size_of::<metaroce_alloc_ucontext_resp>() == 16);
    assert!(size_of::<metaroce_create_cq_resp>() == 24);
    assert!(size_of::<metaroce_resize_cq_resp>() == 24);
    assert!(size_of::<metaroce_create_qp_req>() == 8);
    assert!(size_of::<metaroce_create_qp_resp>() == 40);
    assert!(size_of::<metaroce_create_srq_resp>() == 24);
};
