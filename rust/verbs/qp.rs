// SPDX-License-Identifier: GPL-2.0

//! Queue pairs (RC).
//!
//! A [`Qp`] is what the program sees; the [`QpInner`] in it is what softirq holds. The core
//! numbers WRs and receive messages from 0 at each connection; the queues translate.
//!
//! # Copies and flushes
//!
//! A packet's payload is copied outside of all locks. A [`CopyPlan`] is one such copy and
//! counts in [`QpInner::copies`] until it is dropped. While the count is not zero nothing is
//! flushed: a program may free its memory once it has seen the flush. What is to be flushed
//! meanwhile is put off, and the end of the last copy queues the QP's work item for it.
//!
//! # Refusals
//!
//! | what | errno |
//! | --- | --- |
//! | type other than RC, creation flags, WRs in the doorbell command | EOPNOTSUPP |
//! | more WRs, SGEs, inline bytes or READs than the device has | EINVAL |
//! | all numbers of QPs are in use | ENOSPC |
//! | a transition or attribute that the state table does not have, a state that is not the QP's | EINVAL |
//! | a value out of range: port, P_Key index, rights, QP number, timers, retries | EINVAL |
//! | a path MTU above the port's | EINVAL |
//! | an address vector without GRH or with a GID of RoCE v1, GIDs of two IP versions | EINVAL |
//! | another address vector, or more READs to answer, once connected | EOPNOTSUPP, EINVAL |
//! | alternate paths (migration state other than MIGRATED) | EINVAL |
//! | to RTR: the device is going; too many connections; the connection closes again and again | ENODEV, ENOSPC, EAGAIN |
//! | a doorbell in a state in which nothing may be posted (RESET, INIT, RTR) | EINVAL |
//!
//! Nothing has changed then. What a peer asks for and does not get ([`Fault`]), its QP and this
//! one going to ERR:
//!
//! | refusal | status at the peer | event here |
//! | --- | --- | --- |
//! | the QP does not allow it (WRITE, READ, atomic); atomic address not a multiple of 8 | REM_INV_REQ_ERR | QP_REQ_ERR |
//! | rkey, its PD, rights or range; SEND_WITH_INV of a key that is not one of the PD's | REM_ACCESS_ERR | QP_ACCESS_ERR |
//! | the receive's own memory (see `rq`) | REM_OP_ERR | QP_FATAL |

#![forbid(unsafe_code)]

use super::{
    cq::{mmap_of, CqInner},
    device::{Choice, DeviceInner, Driver},
    extension,
    rq::RecvQueue,
    sq::SendQueue,
    srq::SrqInner,
    MAX_RD_ATOMIC, MAX_SGE, MAX_WR,
};
use crate::{
    bindings,
    drive::{self, Attachment},
    kernel_ext::{
        bh::{self, BhWork},
        ib::{self, Back, Mapping, QpInit, Udata},
        ib_attr::{mask, QpAttr, QpCap, QpEvent, QpState},
        ib_dv::is_net_admin,
        restrack::Details,
    },
    mem::{access, Atomic, Bytes, Frags, Recent, Refused, Scatter, MAX_INLINE},
    net::{Flow, FlowInit, Skb},
    os,
    proto::{
        api::{Event, Fault, Opcode, Placed, Placement, SendWr, Status, Target, Time},
        stream::{self, Stream, StreamAttr},
    },
    queue::{
        dv::{self, ConnectionInfo, Transition},
        Cqe, CreateQpReq, CreateQpResp, Mmap, WorkRing,
    },
};
use ::core::{
    net::Ipv6Addr,
    sync::atomic::{AtomicU32, Ordering},
};
use ::kernel::{
    new_mutex, new_spinlock,
    prelude::*,
    sync::{Arc, Mutex, SpinLock},
    time::{delay::fsleep, Delta},
};

pub use super::notify::Notify;

/// Completion of a receive; the values of `enum ibv_wc_opcode`.
const WC_RECV: u32 = 128;
/// Completion of the receive of a Write with immediate.
const WC_RECV_RDMA_WITH_IMM: u32 = 129;
/// `enum ibv_wc_flags`.
const WC_WITH_IMM: u32 = 1 << 1;
/// `enum ibv_wc_flags`.
const WC_WITH_INV: u32 = 1 << 3;

/// Copies that are running, in [`QpInner::copies`].
const COUNT: u32 = 0xffff;
/// One end of a copy that is just queueing the work item.
const QUEUEING: u32 = 1 << 16;
/// A flush waits for the copies to end.
const FLUSH: u32 = 1 << 31;

/// Bits of [`QpInner::pending`].
mod event {
    pub(super) const FATAL: u32 = 1 << 0;
    pub(super) const REQUEST_ERROR: u32 = 1 << 1;
    pub(super) const ACCESS_ERROR: u32 = 1 << 2;
    pub(super) const ESTABLISHED: u32 = 1 << 3;
    pub(super) const DRAINED: u32 = 1 << 4;
    pub(super) const LAST_WQE: u32 = 1 << 5;
    /// A CQ overflowed: the QP has to go to ERR.
    pub(super) const FAIL: u32 = 1 << 6;
    pub(super) const PATHS: u32 = 1 << 7;
}

/// Values of [`QpInner::listening`].
mod listening {
    pub(super) const NO: u32 = 0;
    /// The next transition of a path is told.
    pub(super) const ARMED: u32 = 1;
    /// One was told, and nothing has been read since.
    pub(super) const TOLD: u32 = 2;
}

/// What the program sees as a QP.
pub struct Qp {
    inner: Arc<QpInner>,
    _sq: Mapping,
    _rq: Option<Mapping>,
}

/// What softirq works with.
#[pin_data]
pub struct QpInner {
    /// The device.
    pub device: Arc<DeviceInner>,
    /// Number, 24 bits.
    pub qpn: u32,
    back: Arc<Back<bindings::ib_qp>>,
    pd: u64,
    /// PD of receive buffers: the SRQ's, if there is one.
    recv_pd: u64,
    send_cq: Arc<CqInner>,
    recv_cq: Arc<CqInner>,
    cap: QpCap,
    signal_all: bool,
    /// What the program named it, for its completions.
    cookie: u64,
    /// A [`QpState`].
    state: AtomicU32,
    /// Rights of the peer.
    access: AtomicU32,
    remote_qpn: AtomicU32,
    /// SQD is complete.
    drained: AtomicU32,
    /// Wants to know when SQD is complete.
    notify_drained: AtomicU32,
    /// [`COUNT`], [`QUEUEING`], [`FLUSH`].
    copies: AtomicU32,
    /// Events that the program does not know yet.
    pending: AtomicU32,
    /// Paths of the connection that it makes; 0: as the device has it.
    wanted_paths: AtomicU32,
    /// Planes over which that connection sends, a bit each; 0: all.
    wanted_planes: AtomicU32,
    /// A value of [`dv::controller`].
    wanted_controller: AtomicU32,
    /// [`dv::ORDERING_RELAXED`] or 0.
    ordering: AtomicU32,
    /// Whether it is told of what becomes of paths; see [`listening`].
    listening: AtomicU32,
    #[pin]
    sq: SpinLock<SendQueue>,
    #[pin]
    rq: SpinLock<RecvQueue>,
    #[pin]
    reads: SpinLock<KVec<ReadSource>>,
    /// Its place in a connection. Changed by verbs only.
    #[pin]
    attachment: SpinLock<Option<Attachment>>,
    /// Attributes; held over a whole verb.
    #[pin]
    verbs: Mutex<Verbs>,
    #[pin]
    work: bh::Item<Self>,
}

/// What only verbs touch.
struct Verbs {
    attr: QpAttr,
}

/// What a peer's READ asked for.
#[derive(Clone, Copy, Default)]
struct ReadSource {
    va: u64,
    rkey: u32,
    length: u32,
}

/// RNR timer values of the IB specification, in units of 10 µs.
const RNR_TIMER: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// Packets above the cumulative number that a stream may have sent.
const WINDOW: u32 = stream::WINDOW_MAX;

impl Qp {
    /// Makes a QP in RESET.
    pub fn new(
        device: &Arc<DeviceInner>,
        back: Arc<Back<bindings::ib_qp>>,
        init: &mut QpInit<'_, Driver>,
        udata: &Udata<'_>,
    ) -> Result<(Self, u32)> {
        // A program of a time without it sends nothing.
        let request: CreateQpReq = udata.request(0)?;
        let cap = &init.cap;
        if cap.max_send_wr > MAX_WR
            || cap.max_send_sge > MAX_SGE
            || cap.max_inline as usize > MAX_INLINE
            || (init.srq.is_none() && (cap.max_recv_wr > MAX_WR || cap.max_recv_sge > MAX_SGE))
        {
            return Err(EINVAL);
        }
        // Slots are multiples of 64 bytes; what that leaves is the program's.
        let wanted = (cap.max_send_sge.max(1) as usize * 16).max(cap.max_inline as usize);
        let body = wanted.next_multiple_of(64);
        let sq_ring = WorkRing::send(cap.max_send_wr.max(1).next_power_of_two(), body)?;
        let sq_map = udata.map(sq_ring.memory())?;
        let mut made = QpCap {
            max_send_wr: sq_ring.entries(),
            max_send_sge: (body / 16) as u32,
            max_inline: body as u32,
            max_recv_wr: 0,
            max_recv_sge: 0,
        };
        let sq = SendQueue::new(sq_ring, body, init.signal_all)?;

        let srq: Option<&Arc<SrqInner>> = init.srq.map(|s| s.inner());
        let (rq, rq_map) = match srq {
            Some(srq) => (RecvQueue::shared(srq.clone())?, None),
            None => {
                made.max_recv_wr = cap.max_recv_wr.max(1).next_power_of_two();
                made.max_recv_sge = cap.max_recv_sge.max(1);
                let ring = WorkRing::receive(made.max_recv_wr, made.max_recv_sge)?;
                let map = udata.map(ring.memory())?;
                (RecvQueue::own(ring, made.max_recv_sge)?, Some(map))
            }
        };
        let reads = KVec::from_elem(
            ReadSource::default(),
            usize::from(MAX_RD_ATOMIC),
            GFP_KERNEL_ACCOUNT,
        )?;
        let pd: u64 = init.pd.number();
        let recv_pd = srq.map_or(pd, |s| s.pd);
        let (send_cq, recv_cq) = (init.send_cq.inner().clone(), init.recv_cq.inner().clone());
        let signal_all = init.signal_all;
        let number = device.qpns.take()?;
        let inner = Arc::pin_init(
            pin_init!(QpInner {
                device: device.clone(),
                qpn: number,
                back,
                pd,
                recv_pd,
                send_cq,
                recv_cq,
                cap: made,
                signal_all,
                cookie: request.cookie,
                state: AtomicU32::new(QpState::Reset as u32),
                access: AtomicU32::new(0),
                remote_qpn: AtomicU32::new(0),
                drained: AtomicU32::new(0),
                notify_drained: AtomicU32::new(0),
                copies: AtomicU32::new(0),
                pending: AtomicU32::new(0),
                wanted_paths: AtomicU32::new(0),
                wanted_planes: AtomicU32::new(0),
                wanted_controller: AtomicU32::new(dv::controller::DEFAULT),
                ordering: AtomicU32::new(0),
                listening: AtomicU32::new(listening::NO),
                sq <- new_spinlock!(sq),
                rq <- new_spinlock!(rq),
                reads <- new_spinlock!(reads),
                attachment <- new_spinlock!(None),
                verbs <- new_mutex!(Verbs {
                    attr: QpAttr::default(),
                }),
                work <- bh::Item::new(),
            }),
            GFP_KERNEL_ACCOUNT,
        )
        .inspect_err(|_| device.qpns.give(number))?;
        let qp = Self {
            _sq: sq_map,
            _rq: rq_map,
            inner,
        };
        udata.respond(&CreateQpResp {
            sq: mmap_of(&qp._sq),
            rq: qp._rq.as_ref().map_or(Mmap { offset: 0, size: 0 }, mmap_of),
            qpn: number,
            max_inline: made.max_inline,
        })?;
        init.cap = made;
        Ok((qp, number))
    }

    /// The part for softirq.
    pub fn inner(&self) -> &Arc<QpInner> {
        &self.inner
    }

    /// Changes state and attributes. `EINVAL` for what the state table or a range does not
    /// allow; nothing has changed then.
    pub fn modify(&self, attr: &QpAttr, mask: u32) -> Result {
        let qp = &self.inner;
        let mut verbs = qp.verbs.lock();
        let from = qp.state();
        if mask & mask::CUR_STATE != 0 && attr.cur_state != from as u32 {
            return Err(EINVAL);
        }
        let to = if mask & mask::STATE != 0 {
            QpState::from_raw(attr.state).ok_or(EINVAL)?
        } else {
            from
        };
        if !ib::transition_allowed(from as u32, to as u32, mask) {
            return Err(EINVAL);
        }
        let new = qp.checked(&verbs.attr, attr, mask, from)?;
        match to {
            QpState::Reset => qp.reset(&mut verbs),
            QpState::Err => {
                verbs.attr = new;
                qp.fail();
            }
            QpState::Rtr if from == QpState::Init => qp.connect(&mut verbs, new)?,
            _ => qp.go(&mut verbs, new, from, to)?,
        }
        Ok(())
    }

    /// Attributes, sizes, and whether all sends are signaled.
    pub fn query(&self) -> (QpAttr, QpCap, bool) {
        let qp = &self.inner;
        let mut attr = qp.verbs.lock().attr;
        let state = qp.state();
        attr.state = state as u32;
        attr.cur_state = state as u32;
        attr.sq_draining = state == QpState::Sqd && qp.drained.load(Ordering::Acquire) == 0;
        (attr, qp.cap, qp.signal_all)
    }

    /// Adds to what `rdma resource show` tells: its queues, and the connection it is in.
    pub fn show(&self, out: &mut Details<'_>) -> Result {
        let qp = &self.inner;
        let (sends, receives) = {
            let _bh = bh::disable();
            let sends = qp.sq.lock().in_use();
            let receives = qp.rq.lock().posted();
            (sends, receives)
        };
        out.number(c"sends", u64::from(sends))?;
        out.number(c"receives", u64::from(receives))?;
        let Some(attachment) = qp.attachment() else {
            return Ok(());
        };
        let conn = attachment.summary();
        out.text(c"peer", format_args!("{}", Ipv6Addr::from(conn.peer)))?;
        out.text(c"connection", format_args!("{:#x}", conn.cid))?;
        out.number(c"paths", conn.paths)?;
        out.number(c"paths_good", conn.paths_good)?;
        out.number(c"planes", conn.planes)?;
        out.number(c"srtt_us", conn.srtt / 1000)?;
        out.number(c"window", conn.window)?;
        out.number(c"inflight", conn.inflight)?;
        out.number(c"retransmits", conn.retransmits)?;
        out.number(c"records", conn.records)
    }

    /// What its connection is like, for programs. `paths` has room for all.
    pub(super) fn inspect(&self, info: &mut ConnectionInfo, paths: &mut os::Vec<dv::Path>) {
        let qp = &self.inner;
        info.now = crate::net::now();
        info.wanted_paths = qp.wanted_paths.load(Ordering::Relaxed);
        info.wanted_planes = qp.wanted_planes.load(Ordering::Relaxed);
        info.wanted_controller = qp.wanted_controller.load(Ordering::Relaxed);
        info.ordering = qp.ordering.load(Ordering::Relaxed);
        info.events = u32::from(qp.listening.load(Ordering::Relaxed) != listening::NO);
        if let Some(attachment) = qp.attachment() {
            extension::inspect(&attachment, info, paths);
        }
    }

    /// Transitions of its connection from number `from` on, within the capacity of `list`.
    /// The next one is told, if it listens.
    pub(super) fn transitions(&self, from: u64, list: &mut os::Vec<Transition>) {
        let qp = &self.inner;
        // First: what comes from here on is told, what came before is read.
        let _ = qp.listening.compare_exchange(
            listening::TOLD,
            listening::ARMED,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
        if let Some(attachment) = qp.attachment() {
            attachment.inspect(&mut |_, _, history| history.read(from, list));
        }
    }

    /// Sets what verbs do not know. Either all of it or nothing.
    pub(super) fn set_extension(&self, attr: &dv::QpAttr) -> Result {
        let qp = &self.inner;
        // Against a verb that takes the QP into a connection or out of one.
        let _verbs = qp.verbs.lock();
        let attachment = qp.attachment();
        let has = |bit: u32| attr.mask & bit != 0;
        if has(dv::mask::PATHS) && attr.paths as usize > crate::proto::connection::PATHS_MAX
            || has(dv::mask::PLANES) && attr.planes >> dv::MAX_PLANES != 0
        {
            return Err(EINVAL);
        }
        if has(dv::mask::CONTROLLER) {
            let chosen = extension::controller(attr.controller)?;
            let restricted =
                chosen.is_some_and(|c| c.is_restricted() && c != qp.device.controller());
            if restricted && !is_net_admin() {
                return Err(EPERM);
            }
        }
        // What holds for the connection that the QP makes.
        let making = dv::mask::PATHS | dv::mask::PLANES | dv::mask::CONTROLLER;
        if has(making) && attachment.is_some() {
            return Err(EISCONN);
        }
        if has(dv::mask::ORDERING) && attr.ordering > dv::ORDERING_RELAXED {
            return Err(EINVAL);
        }
        if has(dv::mask::EVENTS) {
            match (attr.events, &attachment) {
                (0, _) => qp.unlisten(),
                (1, Some(attachment)) => {
                    // First: what comes once it is on the list is told.
                    let before = qp.listening.swap(listening::ARMED, Ordering::AcqRel);
                    if let Err(e) = attachment.listen() {
                        qp.listening.store(before, Ordering::Release);
                        return Err(e);
                    }
                }
                (1, None) => return Err(ENOTCONN),
                _ => return Err(EINVAL),
            }
        }
        if has(dv::mask::PATHS) {
            qp.wanted_paths.store(attr.paths, Ordering::Relaxed);
        }
        if has(dv::mask::PLANES) {
            qp.wanted_planes.store(attr.planes, Ordering::Relaxed);
        }
        if has(dv::mask::CONTROLLER) {
            qp.wanted_controller
                .store(attr.controller, Ordering::Relaxed);
        }
        if has(dv::mask::ORDERING) {
            qp.ordering.store(attr.ordering, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Starts what is in the send ring. `EINVAL` in a state in which nothing may be sent.
    pub fn doorbell(&self) -> Result {
        let qp = &self.inner;
        // Against a verb that takes the QP out of its connection.
        let _verbs = qp.verbs.lock();
        match (qp.state(), qp.attachment()) {
            (QpState::Rts, Some(attachment)) => attachment.doorbell(qp),
            (QpState::Sqd, _) => {}
            (QpState::Err, attachment) => {
                if let Some(attachment) = &attachment {
                    attachment.doorbell(qp);
                }
                qp.flush_rest(attachment.is_none());
            }
            _ => return Err(EINVAL),
        }
        Ok(())
    }

    /// The last verb: afterwards softirq reaches nothing of it.
    pub fn destroy(&self) {
        let qp = &self.inner;
        qp.reset(&mut qp.verbs.lock());
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // Reset: it is in no connection, and no copy is running.
        bh::cancel_sync(&self.inner);
        self.inner.device.qpns.give(self.inner.qpn);
    }
}

// What verbs do; all in process context with the mutex held.
impl QpInner {
    /// `old` with what `mask` says taken from `attr`, ranges checked.
    fn checked(&self, old: &QpAttr, attr: &QpAttr, mask: u32, from: QpState) -> Result<QpAttr> {
        let mut new = *old;
        let has = |bit: u32| mask & bit != 0;
        if has(mask::PKEY_INDEX) {
            if attr.pkey_index != 0 {
                return Err(EINVAL);
            }
            new.pkey_index = 0;
        }
        if has(mask::PORT) {
            if attr.port != ib::PORT {
                return Err(EINVAL);
            }
            new.port = attr.port;
        }
        if has(mask::ACCESS_FLAGS) {
            let known = access::LOCAL_WRITE
                | access::REMOTE_WRITE
                | access::REMOTE_READ
                | access::REMOTE_ATOMIC
                | access::MW_BIND
                | access::OPTIONAL;
            if attr.access & !known != 0 {
                return Err(EINVAL);
            }
            new.access = attr.access & !access::OPTIONAL;
        }
        if has(mask::AV) {
            if !attr.has_grh || !attr.av.is_udp {
                return Err(EINVAL);
            }
            if from != QpState::Init && attr.av != old.av {
                return Err(EOPNOTSUPP);
            }
            new.av = attr.av;
            new.has_grh = true;
        }
        if has(mask::PATH_MTU) {
            if attr.path_mtu < 1 || attr.path_mtu > self.device.active_mtu() {
                return Err(EINVAL);
            }
            new.path_mtu = attr.path_mtu;
        }
        if has(mask::DEST_QPN) {
            if attr.dest_qpn >> 24 != 0 {
                return Err(EINVAL);
            }
            new.dest_qpn = attr.dest_qpn;
        }
        if has(mask::RQ_PSN) {
            new.rq_psn = attr.rq_psn & 0xff_ffff;
        }
        if has(mask::SQ_PSN) {
            new.sq_psn = attr.sq_psn & 0xff_ffff;
        }
        if has(mask::MAX_QP_RD_ATOMIC) {
            if attr.max_rd_atomic > MAX_RD_ATOMIC {
                return Err(EINVAL);
            }
            new.max_rd_atomic = attr.max_rd_atomic;
        }
        if has(mask::MAX_DEST_RD_ATOMIC) {
            // The responder's table is made for a number when the QP is connected.
            if attr.max_dest_rd_atomic > MAX_RD_ATOMIC
                || (from != QpState::Init && attr.max_dest_rd_atomic > old.max_dest_rd_atomic)
            {
                return Err(EINVAL);
            }
            new.max_dest_rd_atomic = attr.max_dest_rd_atomic;
        }
        if has(mask::MIN_RNR_TIMER) {
            if attr.min_rnr_timer > 31 {
                return Err(EINVAL);
            }
            new.min_rnr_timer = attr.min_rnr_timer;
        }
        if has(mask::TIMEOUT) {
            if attr.timeout > 31 {
                return Err(EINVAL);
            }
            new.timeout = attr.timeout;
        }
        if has(mask::RETRY_CNT) {
            if attr.retry_cnt > 7 {
                return Err(EINVAL);
            }
            new.retry_cnt = attr.retry_cnt;
        }
        if has(mask::RNR_RETRY) {
            if attr.rnr_retry > 7 {
                return Err(EINVAL);
            }
            new.rnr_retry = attr.rnr_retry;
        }
        if has(mask::PATH_MIG_STATE) && attr.path_mig_state != 0 {
            // Only MIGRATED: there are no alternate paths of this kind.
            return Err(EINVAL);
        }
        new.en_sqd_async_notify = has(mask::EN_SQD_ASYNC_NOTIFY) && attr.en_sqd_async_notify;
        Ok(new)
    }

    /// For the core.
    fn stream_attr(&self, attr: &QpAttr) -> StreamAttr {
        let timeout: Time = match attr.timeout {
            0 => 0,
            // 4.096 µs times 2^timeout; at most 2^31.
            n => 4096 << n,
        };
        StreamAttr {
            local_qpn: self.qpn,
            remote_qpn: attr.dest_qpn,
            sq_psn: attr.sq_psn,
            rq_psn: attr.rq_psn,
            max_rd_atomic: u32::from(attr.max_rd_atomic),
            max_dest_rd_atomic: u32::from(attr.max_dest_rd_atomic),
            timeout,
            retry_cnt: attr.retry_cnt,
            rnr_retry: attr.rnr_retry,
            min_rnr_timer_us: RNR_TIMER
                .get(usize::from(attr.min_rnr_timer))
                .map_or(10, |n| n * 10),
            payload_mtu: 0,
            window: WINDOW,
        }
    }

    /// What the connection that it makes is like.
    fn choice(&self) -> Result<Choice> {
        let paths = match self.wanted_paths.load(Ordering::Relaxed) {
            0 => self.device.paths(),
            wanted => wanted as usize,
        };
        let planes = match self.wanted_planes.load(Ordering::Relaxed) {
            0 => u8::MAX.into(),
            wanted => wanted,
        };
        let controller = extension::controller(self.wanted_controller.load(Ordering::Relaxed))?;
        Ok(Choice {
            paths: u8::try_from(paths).map_err(|_| EINVAL)?,
            planes: u8::try_from(planes).map_err(|_| EINVAL)?,
            controller: controller.unwrap_or_else(|| self.device.controller()),
        })
    }

    /// INIT to RTR.
    fn connect(self: &Arc<Self>, verbs: &mut Verbs, attr: QpAttr) -> Result {
        let entries = {
            let _bh = bh::disable();
            let entries = self.sq.lock().entries();
            entries
        };
        let mut stream = Stream::new(entries, u32::from(attr.max_dest_rd_atomic))?;
        stream.set_attr(&self.stream_attr(&attr));
        let choice = self.choice()?;
        let flow = Flow::new(FlowInit {
            port: self.device.port.clone(),
            interface: attr.av.ifindex,
            local: attr.av.sgid,
            remote: attr.av.dgid,
            traffic_class: attr.av.traffic_class,
            hop_limit: attr.av.hop_limit,
            paths: usize::from(choice.paths),
        })?;
        let key = drive::Key {
            local: attr.av.sgid,
            remote: attr.av.dgid,
            dscp: attr.av.traffic_class >> 2,
        };
        self.remote_qpn.store(attr.dest_qpn, Ordering::Relaxed);
        self.access.store(attr.access, Ordering::Relaxed);
        // Before the first packet can arrive: from here on the core may report an error.
        self.state.store(QpState::Rtr as u32, Ordering::Release);
        self.device.learn_rates();
        match drive::connect(self, key, flow, choice, stream) {
            Ok(attachment) => {
                verbs.attr = attr;
                attachment.set_state(stream::State::Rtr);
                let _bh = bh::disable();
                *self.attachment.lock() = Some(attachment);
                Ok(())
            }
            Err((e, _stream)) => {
                self.state.store(QpState::Init as u32, Ordering::Release);
                Err(e)
            }
        }
    }

    /// Transitions that change nothing but state and attributes.
    fn go(self: &Arc<Self>, verbs: &mut Verbs, attr: QpAttr, from: QpState, to: QpState) -> Result {
        if from != to {
            self.drained.store(0, Ordering::Release);
        }
        if to == QpState::Sqd {
            let wanted = u32::from(attr.en_sqd_async_notify);
            self.notify_drained.store(wanted, Ordering::Release);
        }
        // An error may come at any moment: then it stays ERR.
        self.state
            .compare_exchange(from as u32, to as u32, Ordering::AcqRel, Ordering::Acquire)
            .map_err(|_| EINVAL)?;
        self.access.store(attr.access, Ordering::Relaxed);
        verbs.attr = attr;
        let Some(attachment) = self.attachment() else {
            return Ok(());
        };
        attachment.set_attr(&self.stream_attr(&attr));
        if from != to {
            match to {
                QpState::Rts => {
                    attachment.set_state(stream::State::Rts);
                    attachment.doorbell(self);
                }
                QpState::Sqd => attachment.set_state(stream::State::Sqd),
                _ => {}
            }
        }
        Ok(())
    }

    /// To ERR, by the program's wish.
    fn fail(self: &Arc<Self>) {
        self.state.store(QpState::Err as u32, Ordering::Release);
        let attachment = self.attachment();
        if let Some(attachment) = &attachment {
            attachment.set_state(stream::State::Err);
            // What is in the ring and not yet fetched.
            attachment.doorbell(self);
        }
        self.flush_rest(attachment.is_none());
    }

    /// To RESET: out of the connection, nothing posted, nothing pending.
    fn reset(self: &Arc<Self>, verbs: &mut Verbs) {
        self.state.store(QpState::Reset as u32, Ordering::Release);
        let attachment = {
            let _bh = bh::disable();
            let attachment = self.attachment.lock().take();
            attachment
        };
        if let Some(attachment) = attachment {
            drop(attachment.disconnect(self));
        }
        // Whoever listened was taken off the connection's list just now.
        self.listening.store(listening::NO, Ordering::Release);
        self.wait_for_copies();
        bh::cancel_sync(self);
        let _bh = bh::disable();
        self.sq.lock().reset();
        self.rq.lock().reset();
        self.copies.store(0, Ordering::Release);
        self.pending.store(0, Ordering::Release);
        self.access.store(0, Ordering::Relaxed);
        verbs.attr = QpAttr::default();
    }

    /// In ERR: flushes receives, and sends when there is no stream that does it.
    fn flush_rest(self: &Arc<Self>, sends: bool) {
        let mut notify = Notify::empty();
        {
            let _bh = bh::disable();
            if sends {
                self.flush_sends(&mut notify);
            }
            self.flush_receives(&mut notify);
        }
        notify.deliver();
    }

    /// Flushes what is in the send ring (no stream has any of it).
    fn flush_sends(self: &Arc<Self>, notify: &mut Notify) {
        let mut sq = self.sq.lock();
        // As many as the ring has: a program that goes on posting rings again.
        for _ in 0..sq.entries() {
            let Some(cqe) = sq.flush_next(&self.device.regions, self.pd) else {
                break;
            };
            self.put(&self.send_cq, cqe, false, notify);
        }
    }
}

// What the driver calls, with the connection's lock held and softirqs off, unless said
// otherwise.
impl QpInner {
    /// Its place in a connection.
    fn attachment(&self) -> Option<Attachment> {
        let _bh = bh::disable();
        let attachment = self.attachment.lock().clone();
        attachment
    }

    /// Is told nothing of paths any more.
    fn unlisten(&self) {
        self.listening.store(listening::NO, Ordering::Release);
        if let Some(attachment) = self.attachment() {
            attachment.unlisten();
        }
    }

    /// A path has changed: the program is told, once until it has read of it.
    pub fn path_changed(self: &Arc<Self>, notify: &mut Notify) {
        let told = self.listening.compare_exchange(
            listening::ARMED,
            listening::TOLD,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
        if told.is_ok() {
            self.raise(event::PATHS, notify);
        }
    }

    /// The state.
    pub fn state(&self) -> QpState {
        QpState::from_raw(self.state.load(Ordering::Acquire)).unwrap_or(QpState::Err)
    }

    /// Writes a completion of this QP; a CQ that has overflowed takes the QP to ERR.
    fn put(self: &Arc<Self>, cq: &Arc<CqInner>, cqe: Cqe, solicited: bool, notify: &mut Notify) {
        let cqe = Cqe {
            qpn: self.qpn,
            src_qpn: self.remote_qpn.load(Ordering::Relaxed),
            cookie: self.cookie,
            ..cqe
        };
        if !cq.push(cqe, solicited, notify) && self.state() != QpState::Err {
            self.raise(event::FATAL | event::FAIL, notify);
        }
    }

    /// Remembers events for the program.
    fn raise(self: &Arc<Self>, events: u32, notify: &mut Notify) {
        if self.pending.fetch_or(events, Ordering::AcqRel) == 0 && !notify.add_qp(self) {
            bh::queue(self);
        }
    }

    /// Tells the program what is pending. No lock is held.
    pub(super) fn tell(self: &Arc<Self>) {
        let events = self.pending.swap(0, Ordering::AcqRel);
        if events & event::FAIL != 0 {
            if let Some(attachment) = self.attachment() {
                attachment.fail(self);
            }
            let mut notify = Notify::empty();
            {
                let _bh = bh::disable();
                self.stream_error(None, &mut notify);
            }
            notify.deliver();
        }
        for (bit, what) in [
            (event::ESTABLISHED, QpEvent::Established),
            (event::DRAINED, QpEvent::Drained),
            (event::REQUEST_ERROR, QpEvent::RequestError),
            (event::ACCESS_ERROR, QpEvent::AccessError),
            (event::FATAL, QpEvent::Fatal),
            (event::LAST_WQE, QpEvent::LastWqe),
            (event::PATHS, QpEvent::PathChanged),
        ] {
            if events & bit != 0 {
                self.back.event(what);
            }
        }
    }

    /// Takes up to `budget` new WQEs out of the ring; `f` may refuse one and thereby end it.
    /// Returns how many were taken. Softirqs are off.
    pub fn fetch_sends(&self, budget: usize, f: &mut dyn FnMut(SendWr) -> bool) -> usize {
        self.sq
            .lock()
            .fetch(budget, &self.device.regions, self.pd, f)
    }

    /// Puts a part of a WR's message into `out`. `Err`: WR or memory is gone.
    pub fn send_source(
        &self,
        wr: u32,
        offset: u32,
        len: u32,
        regions: &mut Recent<'_>,
        out: &mut Frags,
    ) -> Result<(), Refused> {
        self.sq
            .lock()
            .source(wr, offset, len, regions, self.pd, out)
            .ok_or(Refused)
    }

    /// Checks what a peer's READ asks for, and keeps it.
    pub fn read_source(&self, request: u32, va: u64, rkey: u32, length: u32) -> Result<(), Fault> {
        if self.access.load(Ordering::Relaxed) & access::REMOTE_READ == 0 {
            return Err(Fault::InvalidRequest);
        }
        if length != 0 {
            let region = self.device.regions.get(rkey).ok_or(Fault::Access)?;
            region
                .check(self.pd, access::REMOTE_READ, va, u64::from(length))
                .map_err(|_| Fault::Access)?;
        }
        let mut reads = self.reads.lock();
        let slot = request as usize % reads.len().max(1);
        let place = reads.get_mut(slot).ok_or(Fault::Operation)?;
        *place = ReadSource { va, rkey, length };
        Ok(())
    }

    /// The peer has all of READ `request`.
    pub fn release_read(&self, request: u32) {
        let mut reads = self.reads.lock();
        let slot = request as usize % reads.len().max(1);
        if let Some(place) = reads.get_mut(slot) {
            *place = ReadSource::default();
        }
    }

    /// Puts a part of what READ `request` asked for into `out`. `Err`: the memory is gone.
    pub fn read_slice(
        &self,
        request: u32,
        offset: u32,
        len: u32,
        regions: &mut Recent<'_>,
        out: &mut Frags,
    ) -> Result<(), Refused> {
        out.clear();
        if len == 0 {
            return Ok(());
        }
        let source = {
            let reads = self.reads.lock();
            let slot = request as usize % reads.len().max(1);
            *reads.get(slot).ok_or(Refused)?
        };
        if offset.checked_add(len).ok_or(Refused)? > source.length {
            return Err(Refused);
        }
        let va = source.va.checked_add(u64::from(offset)).ok_or(Refused)?;
        let region = regions.get(source.rkey).ok_or(Refused)?;
        let len = u64::from(len);
        region
            .check(self.pd, access::REMOTE_READ, va, len)
            .and_then(|()| region.gather(va, len, out))
    }

    /// Where the payload of a packet belongs; counts as a running copy until it is dropped.
    pub fn plan(self: &Arc<Self>) -> CopyPlan {
        self.copies.fetch_add(1, Ordering::AcqRel);
        CopyPlan { qp: self.clone() }
    }

    /// The part of a scatter list of this QP's that `placement` falls on, and the PD whose
    /// memory it may name; `None` when what it was for is no longer there.
    fn scatter(&self, placement: &Placement, len: u64) -> Option<(u64, Scatter)> {
        match placement.target {
            Target::Receive { rmsn } => {
                let rq = self.rq.lock();
                let (entry, sges) = rq.bound(rmsn)?;
                let offset = u64::from(placement.offset);
                (!entry.bad).then(|| {
                    (
                        self.recv_pd,
                        Scatter::slice(sges.iter().copied(), offset, len),
                    )
                })
            }
            Target::Request { wr } => {
                let sq = self.sq.lock();
                let list = sq.target(wr, placement.offset, len as u32)?;
                Some((self.pd, list))
            }
            Target::Remote { .. } => None,
        }
    }

    /// Whether the target's owner does not look at it before its completion.
    pub fn target_is_relaxed(&self, placement: &Placement) -> bool {
        match placement.target {
            Target::Remote { .. }
                if self.ordering.load(Ordering::Relaxed) == dv::ORDERING_RELAXED =>
            {
                true
            }
            Target::Remote { rkey, .. } => self
                .device
                .regions
                .get(rkey)
                .is_some_and(|region| region.is_relaxed()),
            Target::Receive { .. } | Target::Request { .. } => false,
        }
    }

    /// Does an atomic.
    pub fn atomic(
        &self,
        opcode: Opcode,
        va: u64,
        rkey: u32,
        compare_add: u64,
        swap: u64,
    ) -> Result<u64, Fault> {
        if self.access.load(Ordering::Relaxed) & access::REMOTE_ATOMIC == 0 || va % 8 != 0 {
            return Err(Fault::InvalidRequest);
        }
        let op = match opcode {
            Opcode::CompareSwap => Atomic::CompareSwap {
                compare: compare_add,
                swap,
            },
            Opcode::FetchAdd => Atomic::FetchAdd(compare_add),
            _ => return Err(Fault::InvalidRequest),
        };
        let region = self.device.regions.get(rkey).ok_or(Fault::Access)?;
        region
            .check(self.pd, access::REMOTE_ATOMIC, va, 8)
            .and_then(|()| region.atomic(va, op))
            .map_err(|_| Fault::Access)
    }

    /// Takes a key away from peers (SEND_WITH_INV); the region stays its owner's.
    pub fn invalidate(&self, rkey: u32) -> Result<(), Fault> {
        self.device
            .regions
            .get(rkey)
            .ok_or(Fault::Access)?
            .invalidate(self.pd)
            .map_err(|_| Fault::Access)
    }

    /// Does local WR `wr`: a LOCAL_INV, which is the same from this side.
    pub fn local(&self, wr: u32) -> Status {
        let Some(key) = self.sq.lock().local_key(wr) else {
            return Status::LocalQpOperation;
        };
        match self.invalidate(key) {
            Ok(()) => Status::Success,
            Err(_) => Status::LocalQpOperation,
        }
    }

    /// Binds the next posted receive to message `rmsn`; its length in bytes.
    pub fn bind_receive(&self, rmsn: u32) -> Option<u64> {
        self.rq.lock().bind(rmsn)
    }

    /// Receives posted and not bound.
    pub fn receives_posted(&self) -> Option<u32> {
        Some(self.rq.lock().posted())
    }

    /// Completes send WR `wr`, the oldest one.
    pub fn complete_send(self: &Arc<Self>, wr: u32, status: Status, notify: &mut Notify) {
        let mut sq = self.sq.lock();
        if status == Status::Flushed && (sq.has_deferred() || self.must_wait()) {
            sq.defer(wr);
            return;
        }
        if let Some(cqe) = sq.retire(wr, status) {
            self.put(&self.send_cq, cqe, false, notify);
        }
    }

    /// Completes a receive; `event` is a [`Event::RecvDone`].
    pub fn complete_recv(self: &Arc<Self>, event: &Event, notify: &mut Notify) {
        let Event::RecvDone {
            rmsn,
            opcode,
            length,
            imm,
            solicited,
            status,
            ..
        } = *event
        else {
            return;
        };
        let mut rq = self.rq.lock();
        let Some(wr_id) = rq.complete(rmsn) else {
            return;
        };
        let mut cqe = Cqe {
            wr_id,
            status: status as u32,
            opcode: WC_RECV,
            byte_len: length,
            ..Cqe::default()
        };
        match opcode {
            Opcode::SendImm => {
                cqe.wc_flags = WC_WITH_IMM;
                cqe.imm_data = imm.to_be();
            }
            Opcode::WriteImm => {
                cqe.opcode = WC_RECV_RDMA_WITH_IMM;
                cqe.wc_flags = WC_WITH_IMM;
                cqe.imm_data = imm.to_be();
            }
            Opcode::SendInv => {
                cqe.wc_flags = WC_WITH_INV;
                cqe.imm_data = imm;
            }
            _ => {}
        }
        // The RQ's lock is held over it: completions of a QP come in order.
        self.put(&self.recv_cq, cqe, solicited, notify);
    }

    /// The stream is in error, or a CQ has overflowed: ERR, the event, the flush.
    pub fn stream_error(self: &Arc<Self>, fault: Option<Fault>, notify: &mut Notify) {
        let reset = QpState::Reset as u32;
        let moved = self
            .state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |s| {
                (s != reset).then_some(QpState::Err as u32)
            });
        if moved.is_err() {
            return;
        }
        let events = match fault {
            Some(Fault::InvalidRequest) => event::REQUEST_ERROR,
            Some(Fault::Access) => event::ACCESS_ERROR,
            Some(Fault::Operation) => event::FATAL,
            None => 0,
        };
        if events != 0 {
            self.raise(events, notify);
        }
        self.flush_receives(notify);
    }

    /// The peer's first packet has come: told while the program waits for it.
    pub fn established(self: &Arc<Self>, notify: &mut Notify) {
        if self.state() == QpState::Rtr {
            self.raise(event::ESTABLISHED, notify);
        }
    }

    /// Nothing of the send queue is outstanding after SQD.
    pub fn drained(self: &Arc<Self>, notify: &mut Notify) {
        self.drained.store(1, Ordering::Release);
        if self.state() == QpState::Sqd && self.notify_drained.load(Ordering::Acquire) != 0 {
            self.raise(event::DRAINED, notify);
        }
    }

    /// Whether a flush has to wait for copies; if so the last one does it.
    fn must_wait(&self) -> bool {
        self.copies.load(Ordering::Acquire) & COUNT != 0
            // Whoever ends the last copy after this finds the mark.
            && self.copies.fetch_or(FLUSH, Ordering::AcqRel) & COUNT != 0
    }

    /// In ERR: flushes all receives, unless copies are running: the last one does it then.
    fn flush_receives(self: &Arc<Self>, notify: &mut Notify) {
        let mut rq = self.rq.lock();
        if self.state() != QpState::Err {
            return;
        }
        rq.want_doorbell(true);
        if self.must_wait() {
            return;
        }
        // A program that goes on posting rings the doorbell.
        for _ in 0..=rq.capacity() {
            let Some(wr_id) = rq.flush_next() else { break };
            let cqe = Cqe {
                wr_id,
                status: Status::Flushed as u32,
                opcode: WC_RECV,
                ..Cqe::default()
            };
            self.put(&self.recv_cq, cqe, false, notify);
        }
        if rq.is_shared() && rq.first_flush() {
            drop(rq);
            self.raise(event::LAST_WQE, notify);
        }
    }

    /// Waits until no copy is running. Process context; the QP is in no connection.
    pub fn wait_for_copies(&self) {
        // A copy is a few microseconds of a softirq on another CPU.
        while self.copies.load(Ordering::Acquire) & !FLUSH != 0 {
            fsleep(Delta::from_micros(10));
        }
    }
}

impl BhWork for QpInner {
    fn item(&self) -> &bh::Item<Self> {
        &self.work
    }

    /// What was put off: flushes and events.
    fn run(this: Arc<Self>) {
        let mut notify = Notify::empty();
        if !this.must_wait() {
            let mut sq = this.sq.lock();
            while let Some(cqe) = sq.flush_deferred() {
                this.put(&this.send_cq, cqe, false, &mut notify);
            }
        }
        this.flush_receives(&mut notify);
        notify.deliver();
        this.tell();
    }
}

/// One copy of a packet's payload to where it belongs.
pub struct CopyPlan {
    qp: Arc<QpInner>,
}

impl CopyPlan {
    /// Copies the payload, which begins at byte `skip` of `skb`. No lock is held.
    pub fn copy(
        &self,
        skb: &Skb,
        skip: u32,
        placement: &Placement,
        regions: &mut Recent<'_>,
    ) -> Placed {
        let word;
        let (from, len) = match placement.value {
            Some(value) => {
                word = value.to_ne_bytes();
                (Bytes::Slice(&word), 8)
            }
            None => (Bytes::Skb(skb, skip), u64::from(placement.len)),
        };
        match placement.target {
            Target::Remote { va, rkey } => {
                if self.qp.access.load(Ordering::Relaxed) & access::REMOTE_WRITE == 0 {
                    return Placed::Fault(Fault::InvalidRequest);
                }
                if placement.total == 0 {
                    return Placed::Ok;
                }
                let Some(region) = regions.get(rkey) else {
                    return Placed::Fault(Fault::Access);
                };
                let total = u64::from(placement.total);
                let copied = region
                    .check(self.qp.pd, access::REMOTE_WRITE, va, total)
                    .and_then(|()| {
                        // The whole message lies in the region, so this does not overflow.
                        let at = va.wrapping_add(u64::from(placement.offset));
                        if u64::from(placement.offset) + len > total {
                            return Err(Refused);
                        }
                        if placement.last && !region.is_relaxed() {
                            region.write_last(at, len, &from, 0)
                        } else {
                            region.write(at, len, &from, 0)
                        }
                    });
                match copied {
                    Ok(()) => Placed::Ok,
                    Err(_) => Placed::Fault(Fault::Access),
                }
            }
            Target::Receive { .. } | Target::Request { .. } => {
                let written = self
                    .qp
                    .scatter(placement, len)
                    .ok_or(Refused)
                    .and_then(|(pd, list)| list.write(regions, pd, len, &from, 0, placement.last));
                match written {
                    Ok(()) => Placed::Ok,
                    Err(Refused) => Placed::Fault(Fault::Operation),
                }
            }
        }
    }
}

impl Drop for CopyPlan {
    fn drop(&mut self) {
        let copies = &self.qp.copies;
        let before = copies.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
            Some(if now & (FLUSH | COUNT) == FLUSH | 1 {
                now - 1 - FLUSH + QUEUEING
            } else {
                now - 1
            })
        });
        if before.is_ok_and(|was| was & (FLUSH | COUNT) == FLUSH | 1) {
            // It was the last one: what waits for it may be done now. Destruction waits
            // until the item is queued, and cancels it then.
            bh::queue(&self.qp);
            copies.fetch_sub(QUEUEING, Ordering::AcqRel);
        }
    }
}
