// SPDX-License-Identifier: GPL-2.0

//! The verbs, one file per object.
//!
//! # Who holds what
//!
//! The RDMA core owns the objects that programs see (`ib_qp` …) and destroys them in an
//! order of its own: queue pairs before their CQs, SRQs and PDs. Behind each is an `Arc` of
//! the part that softirq works with ([`qp::QpInner`], [`cq::CqInner`], [`srq::SrqInner`]);
//! softirq holds these only. Destroying a QP takes it out of its connection, waits for the
//! copies that run for it, and cancels its work item; what is left are references that do
//! nothing but free memory. No event or completion handler is called once a destroy verb has
//! begun (see [`crate::kernel_ext::ib::Back`]).
//!
//! # Locks
//!
//! QP mutex (process context) → connection (drive) → RQ → SRQ → CQ; the SQ's and the READ
//! table's locks order like the RQ's and are never held together with it. Handlers of the
//! RDMA core are called with none of them held. Softirq takes all but the mutex, so a verb
//! switches softirqs off before it locks. A guard needs a name of its own then: that of a
//! block's last expression is dropped after the block's variables, softirqs' return included.
//!
//! # The doorbell
//!
//! Programs post by writing WQEs into the mapped ring and enter the kernel once for any
//! number of them: an empty POST_SEND command, which ends up in [`qp::Qp::doorbell`]. It
//! copies each WQE once, checks the copy, and hands it to the core. In the state ERR the
//! same doorbell flushes, receives as well.
//!
//! # Refusals
//!
//! Each file says at its top what its verbs refuse, and `sq`, `rq` and `qp` which status a WR
//! ends with. What is refused wherever it is met, before a verb sees it or by all alike:
//!
//! | what | errno |
//! | --- | --- |
//! | no memory, or none left in the program's cgroup | ENOMEM |
//! | driver data of a request that is too short (of a response: it is cut) | EINVAL |
//! | driver data that this version does not know and that is not 0 | EOPNOTSUPP |
//! | driver data, or an answer, at an address that is not the program's | EFAULT |
//! | a verb that the device does not have (windows, multicast, SRQ resize, dma-buf …), a kernel user | EOPNOTSUPP |
//! | `mmap` of anything but a whole ring of this context, or privately | EINVAL |
//! | P_Key index other than 0, counters of another port than 1 | EINVAL |
//! | a GID of another netdev than the device's (to the RDMA core) | EADDRNOTAVAIL |
//! | any verb once the device is gone | EIO or ENODEV (from the RDMA core) |

#![forbid(unsafe_code)]

pub mod counters;
pub mod cq;
pub mod device;
pub mod extension;
pub mod link;
pub mod mr;
pub mod notify;
pub mod pd;
pub mod planes;
pub mod port;
pub mod qp;
pub mod rq;
pub mod sq;
pub mod srq;
pub mod ucontext;

/// WRs of a queue at the most.
pub const MAX_WR: u32 = 16384;
/// SGEs of a WR at the most.
pub const MAX_SGE: u32 = crate::mem::MAX_SGE as u32;
/// Completions of a CQ at the most.
pub const MAX_CQE: u32 = 1 << 20;
/// Outstanding READs and atomics of a QP, either way.
pub const MAX_RD_ATOMIC: u8 = 128;
