// SPDX-License-Identifier: GPL-2.0

//! The structs of <rdma/metaroce-abi.h>, and what slots hold as plain values.
//!
//! The structs are bindgen's; `layout` pins their numbers, for module and plugin alike. The plain
//! values ([`SendWqe`], [`RecvWqe`], [`Cqe`]) have a layout of their own: each field is taken from
//! the place, and has the type, that the header gives it.

use crate::bindings;
use ::core::mem::{offset_of, size_of};
use ::kernel::transmute::{AsBytes, FromBytes};

pub use bindings::{
    metaroce_alloc_ucontext_req as AllocUcontextReq,
    metaroce_alloc_ucontext_resp as AllocUcontextResp, metaroce_create_cq_resp as CreateCqResp,
    metaroce_create_qp_req as CreateQpReq, metaroce_create_qp_resp as CreateQpResp,
    metaroce_create_srq_resp as CreateSrqResp, metaroce_mmap as Mmap,
    metaroce_resize_cq_resp as ResizeCqResp,
};

/// ABI version that this module speaks.
pub const ABI_VERSION: u32 = bindings::METAROCE_ABI_VERSION;
/// RDMA driver id.
pub const DRIVER_ID: u32 = bindings::METAROCE_DRIVER_ID;
/// What a node GUID has under [`GUID_MASK`].
pub const GUID_MARK: u64 = bindings::METAROCE_GUID_MARK;
/// Bits of a node GUID that tell this driver's devices.
pub const GUID_MASK: u64 = bindings::METAROCE_GUID_MASK as u64;

// bindgen gives it a signed type of its own.
const _: () = assert!(GUID_MASK == 0xffff_ff00_0000_0000);

#[path = "../../uapi/rdma/layout.rs"]
mod layout;

// SAFETY: integers only, no padding (`layout` asserts it).
unsafe impl FromBytes for AllocUcontextReq {}
// SAFETY: as above.
unsafe impl AsBytes for AllocUcontextReq {}
// SAFETY: as above.
unsafe impl AsBytes for AllocUcontextResp {}
// SAFETY: as above.
unsafe impl AsBytes for CreateCqResp {}
// SAFETY: as above.
unsafe impl AsBytes for ResizeCqResp {}
// SAFETY: as above.
unsafe impl FromBytes for CreateQpReq {}
// SAFETY: as above.
unsafe impl AsBytes for CreateQpResp {}
// SAFETY: as above.
unsafe impl AsBytes for CreateSrqResp {}

/// Head of a send WQE, copied out of the ring.
#[derive(Clone, Copy, Default)]
pub struct SendWqe {
    /// The program's name for it.
    pub wr_id: u64,
    /// `enum metaroce_send_opcode`.
    pub opcode: u32,
    /// `enum metaroce_send_flags`.
    pub flags: u32,
    /// Remote address.
    pub remote_addr: u64,
    /// Remote key.
    pub rkey: u32,
    /// Immediate data as it lies in memory (network order), or a key in host order.
    pub imm_data: u32,
    /// Compare or add operand.
    pub compare_add: u64,
    /// Swap operand.
    pub swap: u64,
    /// SGEs that follow.
    pub num_sge: u32,
    /// Inline bytes that follow.
    pub inline_len: u32,
    /// To be 0.
    pub reserved: [u32; 2],
}

/// A field among the 64-bit words that a struct is copied as.
trait Field: Copy {
    /// The one at byte `offset`, which is aligned for it.
    fn get(words: &[u64], offset: usize) -> Self;
    /// The inverse.
    fn put(self, words: &mut [u64], offset: usize);
}

impl Field for u64 {
    #[inline(always)]
    fn get(words: &[u64], offset: usize) -> Self {
        words[offset / 8]
    }

    #[inline(always)]
    fn put(self, words: &mut [u64], offset: usize) {
        words[offset / 8] = self;
    }
}

/// Bits below the 32-bit field at byte `offset` in its word.
#[inline(always)]
fn below(offset: usize) -> usize {
    let first = offset % 8 * 8;
    if cfg!(target_endian = "big") {
        32 - first
    } else {
        first
    }
}

impl Field for u32 {
    #[inline(always)]
    fn get(words: &[u64], offset: usize) -> Self {
        (words[offset / 8] >> below(offset)) as u32
    }

    #[inline(always)]
    fn put(self, words: &mut [u64], offset: usize) {
        let others = words[offset / 8] & !(u64::from(u32::MAX) << below(offset));
        words[offset / 8] = others | (u64::from(self) << below(offset));
    }
}

impl Field for [u32; 2] {
    #[inline(always)]
    fn get(words: &[u64], offset: usize) -> Self {
        [u32::get(words, offset), u32::get(words, offset + 4)]
    }

    #[inline(always)]
    fn put(self, words: &mut [u64], offset: usize) {
        self[0].put(words, offset);
        self[1].put(words, offset + 4);
    }
}

/// [`Field::get`] with the type that field `F` of `S` has in the header.
#[inline(always)]
fn get<S, F: Field>(words: &[u64], offset: usize, _: fn(&S) -> &F) -> F {
    F::get(words, offset)
}

/// [`Field::put`], likewise.
#[inline(always)]
fn put<S, F: Field>(words: &mut [u64], offset: usize, _: fn(&S) -> &F, value: F) {
    value.put(words, offset);
}

/// `Self` with each field taken from where a C `$c` that `$words` hold has it.
macro_rules! take {
    ($words:ident, $c:ident, $($field:ident)*) => {{
        let words: &[u64; size_of::<bindings::$c>() / 8] = $words;
        Self { $($field: get(words, offset_of!(bindings::$c, $field), |c: &bindings::$c| &c.$field),)* }
    }};
}

/// The words of a C `$c` with fields of `$value`, the others 0.
macro_rules! words {
    ($value:ident, $c:ident, $($field:ident)*) => {{
        let mut words = [0u64; size_of::<bindings::$c>() / 8];
        $(put(
            &mut words,
            offset_of!(bindings::$c, $field),
            |c: &bindings::$c| &c.$field,
            $value.$field,
        );)*
        words
    }};
}

impl SendWqe {
    /// From the words of the slot's head.
    pub fn from_words(w: &[u64; super::SEND_HEAD_WORDS]) -> Self {
        take!(w, metaroce_send_wqe, wr_id opcode flags remote_addr rkey imm_data compare_add swap
              num_sge inline_len reserved)
    }
}

/// Head of a receive WQE, copied out of the ring.
#[derive(Clone, Copy, Default)]
pub struct RecvWqe {
    /// The program's name for it.
    pub wr_id: u64,
    /// SGEs that follow.
    pub num_sge: u32,
    /// To be 0.
    pub reserved: u32,
}

impl RecvWqe {
    /// From the words of the slot's head.
    pub fn from_words(w: &[u64; super::RECV_HEAD_WORDS]) -> Self {
        take!(w, metaroce_recv_wqe, wr_id num_sge reserved)
    }
}

impl crate::mem::Sge {
    /// From the words of a `struct metaroce_sge`.
    pub fn from_words(w: &[u64; super::SGE_WORDS]) -> Self {
        take!(w, metaroce_sge, addr length lkey)
    }
}

/// A completion, as it goes into a CQ slot.
#[derive(Clone, Copy, Default)]
pub struct Cqe {
    /// The program's name for the WR.
    pub wr_id: u64,
    /// `enum ibv_wc_status`.
    pub status: u32,
    /// `enum ibv_wc_opcode`.
    pub opcode: u32,
    /// Bytes received.
    pub byte_len: u32,
    /// Immediate data as it lies in memory (network order), or a key in host order.
    pub imm_data: u32,
    /// The QP's number.
    pub qpn: u32,
    /// The peer's QP number.
    pub src_qpn: u32,
    /// `enum ibv_wc_flags`.
    pub wc_flags: u32,
    /// More about an error.
    pub vendor_err: u32,
    /// ns, CLOCK_MONOTONIC.
    pub timestamp: u64,
    /// Send queue: index in the ring of the WQE.
    pub wqe_index: u32,
    /// Send queue: what the program named the QP at its creation.
    pub cookie: u64,
}

impl Cqe {
    /// The words of the slot.
    pub fn to_words(self) -> [u64; 8] {
        words!(self, metaroce_cqe, wr_id status opcode byte_len imm_data qpn src_qpn wc_flags
               vendor_err timestamp wqe_index cookie)
    }
}
