// SPDX-License-Identifier: GPL-2.0

//! Rings shared with user space.
//!
//! <rdma/metaroce-abi.h> describes their layout and who owns which index. Nothing that the
//! kernel reads from a ring is believed: it keeps private copies of its own indices, a slot
//! is copied once before it is looked at, and an index of the program is clamped to what the
//! ring can hold. Whatever a program writes into its rings, it harms itself only.

mod abi;
pub mod dv;
mod order;
mod ring;

use ::core::sync::atomic;

pub use self::{
    abi::{
        AllocUcontextReq, AllocUcontextResp, Cqe, CreateCqResp, CreateQpReq, CreateQpResp,
        CreateSrqResp, Mmap, RecvWqe, ResizeCqResp, SendWqe, ABI_VERSION, DRIVER_ID, GUID_MARK,
        GUID_MASK,
    },
    ring::{CqRing, Memory, WorkRing, RECV_HEAD_WORDS, SEND_HEAD_WORDS, SGE_WORDS},
};
