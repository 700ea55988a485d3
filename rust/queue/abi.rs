// SPDX-License-Identifier: GPL-2.0

//! The structs of <rdma/metaroce-abi.h>, with their sizes checked, and as plain values.

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

// Layout: what user space relies on.
const _: () = {
    // bindgen gives it a signed type of its own.
    assert!(GUID_MASK == 0xffff_ff00_0000_0000);
    assert!(size_of::<bindings::metaroce_ring>() == 256);
    assert!(offset_of!(bindings::metaroce_ring, producer) == 64);
    assert!(offset_of!(bindings::metaroce_ring, consumer) == 128);
    assert!(offset_of!(bindings::metaroce_ring, arm) == 192);
    assert!(size_of::<bindings::metaroce_send_wqe>() == 64);
    assert!(size_of::<bindings::metaroce_recv_wqe>() == 16);
    assert!(size_of::<bindings::metaroce_sge>() == 16);
    assert!(size_of::<bindings::metaroce_cqe>() == 64);
    assert!(size_of::<AllocUcontextReq>() == 16);
    assert!(size_of::<AllocUcontextResp>() == 16);
    assert!(size_of::<CreateCqResp>() == 24);
    assert!(size_of::<ResizeCqResp>() == 24);
    assert!(size_of::<CreateQpReq>() == 8);
    assert!(size_of::<CreateQpResp>() == 40);
    assert!(size_of::<CreateSrqResp>() == 24);
};

// SAFETY: integers only, no padding (sizes above are the sums of their fields).
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
    pub imm: u32,
    /// Compare or add operand.
    pub compare_add: u64,
    /// Swap operand.
    pub swap: u64,
    /// SGEs that follow.
    pub num_sge: u32,
    /// Inline bytes that follow.
    pub inline_len: u32,
    /// To be 0.
    pub reserved: u64,
}

/// The two 32-bit halves of a word, in memory order.
const fn halves(word: u64) -> (u32, u32) {
    let b = word.to_ne_bytes();
    (
        u32::from_ne_bytes([b[0], b[1], b[2], b[3]]),
        u32::from_ne_bytes([b[4], b[5], b[6], b[7]]),
    )
}

/// The inverse of [`halves`].
const fn join(first: u32, second: u32) -> u64 {
    let (a, b) = (first.to_ne_bytes(), second.to_ne_bytes());
    u64::from_ne_bytes([a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]])
}

impl SendWqe {
    /// From the words of the slot's head.
    pub fn from_words(w: &[u64; super::SEND_HEAD_WORDS]) -> Self {
        let (opcode, flags) = halves(w[1]);
        let (rkey, imm) = halves(w[3]);
        let (num_sge, inline_len) = halves(w[6]);
        Self {
            wr_id: w[0],
            opcode,
            flags,
            remote_addr: w[2],
            rkey,
            imm,
            compare_add: w[4],
            swap: w[5],
            num_sge,
            inline_len,
            reserved: w[7],
        }
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
        let (num_sge, reserved) = halves(w[1]);
        Self {
            wr_id: w[0],
            num_sge,
            reserved,
        }
    }
}

impl crate::mem::Sge {
    /// From the words of a `struct metaroce_sge`.
    pub fn from_words(w: &[u64; super::SGE_WORDS]) -> Self {
        let (length, lkey) = halves(w[1]);
        Self {
            addr: w[0],
            length,
            lkey,
        }
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
    pub imm: u32,
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
        [
            self.wr_id,
            join(self.status, self.opcode),
            join(self.byte_len, self.imm),
            join(self.qpn, self.src_qpn),
            join(self.wc_flags, self.vendor_err),
            self.timestamp,
            join(0, self.wqe_index),
            self.cookie,
        ]
    }
}
