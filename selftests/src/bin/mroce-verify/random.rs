// SPDX-License-Identifier: GPL-2.0
//! Random requests on many QPs, both directions at once, against the model: content of every
//! region byte by byte, order and number of completions, sources overwritten at once when
//! their request completes (so that an early completion shows as wrong data).

#![forbid(unsafe_code)]

use crate::model::{self, Kind, Limits, Plan, CANARY};
use crate::Run;
use selftests::endpoint::{Endpoint, Remote};
use selftests::ktap::Outcome;
use selftests::rng::{self, Rng};
use selftests::sys::Memory;
use selftests::verbs::{self, Channel, Cq, Mr, Qp, QpInit, SendWr, Srq, Wc};
use selftests::{check, fail};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a round looks like; chosen from the seed on both ends alike.
#[derive(Clone, Debug)]
pub struct Shape {
    qps: usize,
    threads: usize,
    depth: u32,
    limits: Limits,
    srq: bool,
    events: bool,
    one_cq: bool,
    late: bool,
    relaxed: bool,
    batches: usize,
}

impl Shape {
    fn of(run: &Run, ep_max_sge: usize, rng: &mut Rng) -> Shape {
        let quick = run.short;
        let qps = *rng.pick(if quick { &[1, 2, 5][..] } else { &[1, 2, 3, 8, 16, 64][..] });
        let threads = rng.range(1, qps.min(4) as u64) as usize;
        let big = qps <= 3 && rng.one_in(3);
        let max_len = if big { 1 << 20 } else { *rng.pick(&[200, 9000, 40_000]) };
        let depth = *rng.pick(&[1, 2, 7, 32, 128]);
        let max_sge = rng.range(1, ep_max_sge.min(16) as u64) as usize;
        let p = run.payload;
        let boundaries = [64, 256, 1024, 4096, p, 2 * p, 3 * p, 4 * p, 16 * p, 64 * p, 256 * p];
        let srq = rng.one_in(4);
        let relaxed = rng.one_in(6);
        Shape {
            qps,
            threads,
            depth,
            limits: Limits {
                count: rng.range(5, if quick { 60 } else { 200 }) as usize,
                max_sge,
                max_inline: 0,
                max_unsignaled: (depth as usize / 2).saturating_sub(1).min(20),
                max_len,
                boundaries: boundaries.into_iter().filter(|b| *b <= max_len).collect(),
                target: (4 * max_len).max(4096),
                source: if big { 8 << 20 } else { 1 << 20 },
                destination: if big { 8 << 20 } else { 1 << 20 },
                receive: if big { 8 << 20 } else { 1 << 20 },
                reads: !rng.one_in(5),
                atomics: !rng.one_in(4),
                sends: !rng.one_in(6),
                signal_all: rng.one_in(5),
                disjoint: relaxed,
                slot: srq.then_some(max_len.min(9000)),
            },
            srq,
            events: rng.one_in(3),
            one_cq: rng.one_in(2),
            late: rng.one_in(3),
            relaxed,
            batches: rng.range(1, 4) as usize,
        }
    }
}

/// A QP with its regions, and what they must hold.
struct Lane {
    index: usize,
    qp: Arc<Qp>,
    source: Arc<Mr>,
    destination: Arc<Mr>,
    target: Arc<Mr>,
    receive: Arc<Mr>,
    remote: Remote,
    /// Image of the own target region (the peer writes it).
    own_target: Vec<u8>,
    /// Image of the peer's target region (this end writes it).
    peer_target: Vec<u8>,
    own_destination: Vec<u8>,
    own_receive: Vec<u8>,
}

/// Progress of a lane in a batch.
struct Flow<'a> {
    lane: &'a Lane,
    mine: &'a Plan,
    theirs: &'a Plan,
    /// Requests posted, requests known to be done.
    posted: usize,
    done: usize,
    /// Receives posted, receives completed.
    receives_posted: usize,
    receives_done: usize,
    /// Receive slots of a shared queue that hold a message: slot and its length.
    rng: Rng,
}

struct SrqSlots {
    srq: Arc<Srq>,
    region: Arc<Mr>,
    slot: usize,
    count: usize,
}

/// Queues of a worker thread.
struct Queues {
    send: Arc<Cq>,
    receive: Arc<Cq>,
    channel: Option<Arc<Channel>>,
    srq: Option<SrqSlots>,
}

fn describe(flow: &Flow, op: &model::Op, index: usize) -> String {
    format!(
        "QP {:#x} (lane {}) request {index}: {:?} of {} bytes to offset {:#x}, flags {:#x}, {} SGEs{}",
        flow.lane.qp.number,
        flow.lane.index,
        op.kind,
        op.len,
        op.remote,
        op.flags,
        op.local.len(),
        if op.chained { ", chained" } else { "" }
    )
}

fn gather(mr: &Mr, pieces: &[(usize, usize)]) -> Vec<u8> {
    pieces.iter().flat_map(|(at, len)| mr.memory.copy(mr.base + at, *len)).collect()
}

impl Flow<'_> {
    fn finished(&self) -> bool {
        self.done == self.mine.ops.len() && self.receives_done == self.theirs.receives.len()
    }

    /// Posts what fits; true when something was posted.
    fn post(&mut self) -> Outcome<bool> {
        let depth = self.lane.qp.cap.max_send_wr as usize;
        let room = depth.saturating_sub(self.posted - self.done);
        let left = self.mine.ops.len() - self.posted;
        let most = room.min(left);
        if most == 0 {
            return Ok(false);
        }
        let count = self.rng.range(1, most.min(8) as u64) as usize;
        let mut list = Vec::with_capacity(count);
        for index in self.posted..self.posted + count {
            let op = &self.mine.ops[index];
            let from =
                if op.kind.returns() || op.chained { &self.lane.destination } else { &self.lane.source };
            list.push(SendWr {
                wr_id: index as u64,
                sges: op.local.iter().map(|(at, len)| from.sge(*at, *len)).collect(),
                opcode: op.kind.opcode(),
                flags: op.flags,
                imm: op.imm,
                remote_addr: self.lane.remote.addr + op.remote as u64,
                rkey: self.lane.remote.rkey,
                compare_add: op.compare_add,
                swap: op.swap,
            });
        }
        if let Err(error) = self.lane.qp.post_send(&list) {
            let at = self.posted + error.taken;
            fail!("{}: {error}", describe(self, &self.mine.ops[at.min(self.mine.ops.len() - 1)], at));
        }
        // Inline data is copied by the call; the source is free at once.
        for index in self.posted..self.posted + count {
            let op = &self.mine.ops[index];
            if op.flags & verbs::IBV_SEND_INLINE != 0 {
                self.scribble(op);
            }
        }
        self.posted += count;
        Ok(true)
    }

    fn scribble(&self, op: &model::Op) {
        if !op.kind.returns() && !op.chained {
            for (at, len) in &op.local {
                self.lane.source.memory.set(*at, *len, 0xee);
            }
        }
    }

    fn post_receives(&mut self, most: usize) -> Outcome<bool> {
        let room =
            (self.lane.qp.cap.max_recv_wr as usize).saturating_sub(self.receives_posted - self.receives_done);
        let count = room.min(self.theirs.receives.len() - self.receives_posted).min(most);
        for _ in 0..count {
            let index = self.receives_posted;
            let sges: Vec<_> = self.theirs.receives[index]
                .local
                .iter()
                .map(|(at, len)| self.lane.receive.sge(*at, *len))
                .collect();
            self.lane
                .qp
                .post_recv(index as u64, &sges)
                .map_err(|error| format!("QP {:#x}: post_recv {index}: {error}", self.lane.qp.number))?;
            self.receives_posted += 1;
        }
        Ok(count > 0)
    }

    /// Takes a completion of the send queue.
    fn sent(&mut self, wc: &Wc) -> Outcome {
        let qpn = self.lane.qp.number;
        // The next signaled request must be the one.
        let Some(index) = (self.done..self.posted).find(|i| self.mine.ops[*i].signaled()) else {
            fail!(
                "QP {qpn:#x}: a completion (wr_id {}, {}) although nothing is due",
                wc.wr_id,
                verbs::status_name(wc.status)
            );
        };
        let op = &self.mine.ops[index];
        let what = describe(self, op, index);
        check!(
            wc.status == verbs::IBV_WC_SUCCESS,
            "{what}: completed with {} (vendor {:#x}, wr_id {})",
            verbs::status_name(wc.status),
            wc.vendor_err,
            wc.wr_id
        );
        check!(wc.wr_id == index as u64, "{what}: is due, wr_id {} completed", wc.wr_id);
        check!(wc.opcode == op.kind.wc_opcode(), "{what}: opcode {} in the completion", wc.opcode);
        if op.kind == Kind::Read || op.kind == Kind::Cas || op.kind == Kind::Faa {
            check!(wc.byte_len as usize == op.len, "{what}: byte_len {}", wc.byte_len);
        }
        // Every request up to this one is done: what it brought is there, its source is free.
        for i in self.done..=index {
            let op = &self.mine.ops[i];
            if op.kind.returns() {
                rng::compare(&gather(&self.lane.destination, &op.local), &op.result)
                    .map_err(|m| format!("{}: completed with wrong data: {m}", describe(self, op, i)))?;
            }
            self.scribble(op);
        }
        self.done = index + 1;
        Ok(())
    }

    /// Takes a completion of the receive queue.
    fn received(&mut self, wc: &Wc, srq: Option<&SrqSlots>) -> Outcome {
        let qpn = self.lane.qp.number;
        let index = self.receives_done;
        check!(
            index < self.theirs.receives.len(),
            "QP {qpn:#x}: receive completion {} of {} planned",
            index + 1,
            self.theirs.receives.len()
        );
        let receive = &self.theirs.receives[index];
        let op = &self.theirs.ops[receive.op];
        let what = format!("receive {index} for {}", describe(self, op, receive.op));
        check!(
            wc.status == verbs::IBV_WC_SUCCESS,
            "{what}: completed with {} (vendor {:#x})",
            verbs::status_name(wc.status),
            wc.vendor_err
        );
        if srq.is_none() {
            check!(wc.wr_id == index as u64, "{what}: is due, wr_id {} completed", wc.wr_id);
        }
        let (opcode, carried) = match op.kind {
            Kind::WriteImm => (verbs::IBV_WC_RECV_RDMA_WITH_IMM, 0),
            _ => (verbs::IBV_WC_RECV, op.len),
        };
        check!(wc.opcode == opcode, "{what}: opcode {}", wc.opcode);
        check!(wc.byte_len as usize == op.len, "{what}: byte_len {}", wc.byte_len);
        let with_imm = wc.wc_flags & verbs::IBV_WC_WITH_IMM != 0;
        check!(with_imm == (op.kind != Kind::Send), "{what}: wc_flags {:#x}", wc.wc_flags);
        if with_imm {
            check!(
                verbs::wc_imm(wc) == op.imm,
                "{what}: immediate data {:#x} instead of {:#x}",
                verbs::wc_imm(wc),
                op.imm
            );
        }
        if op.kind != Kind::WriteImm {
            let found = match srq {
                Some(s) => s.region.memory.copy(wc.wr_id as usize * s.slot, carried),
                None => gather(&self.lane.receive, &receive.local)[..carried].to_vec(),
            };
            rng::compare(&found, &op.payload).map_err(|m| format!("{what}: wrong data: {m}"))?;
        }
        // Everything that the peer sent before is in place: the nearest Write that nothing
        // changes afterwards shows it.
        let before = self.theirs.ops[..=receive.op]
            .iter()
            .enumerate()
            .rev()
            .take(8)
            .find(|(_, op)| matches!(op.kind, Kind::Write | Kind::WriteImm) && op.stable);
        if let Some((i, write)) = before {
            rng::compare(&self.lane.target.memory.copy(write.remote, write.len), &write.payload).map_err(
                |m| format!("{what}: the earlier {} is not in place: {m}", describe(self, write, i)),
            )?;
        }
        self.receives_done += 1;
        Ok(())
    }
}

/// Runs the lanes of one thread through a batch.
fn work(run: &Run, ep: &Endpoint, shape: &Shape, queues: &Queues, flows: &mut [Flow], seed: u64) -> Outcome {
    let mut rng = Rng::of(&[seed, 77]);
    let by_qpn: HashMap<u32, usize> = flows.iter().enumerate().map(|(i, f)| (f.lane.qp.number, i)).collect();
    let mut wcs = vec![Wc::default(); 32];
    let mut last = Instant::now();
    let mut idle = 0u32;
    loop {
        let mut progress = false;
        for flow in flows.iter_mut() {
            if queues.srq.is_none() {
                let most = if shape.late { rng.below(3) as usize } else { usize::MAX };
                progress |= flow.post_receives(most)?;
            }
            if rng.below(4) != 0 {
                progress |= flow.post()?;
            }
        }
        let cqs: &[&Arc<Cq>] = if shape.one_cq { &[&queues.send] } else { &[&queues.send, &queues.receive] };
        for cq in cqs {
            let most = rng.range(1, wcs.len() as u64) as usize;
            let n = cq.poll(&mut wcs[..most]).map_err(|e| e.to_string())?;
            progress |= n > 0;
            for wc in &wcs[..n] {
                let Some(flow) = by_qpn.get(&wc.qp_num).and_then(|i| flows.get_mut(*i)) else {
                    fail!(
                        "a completion of QP {:#x}, which does not use this CQ (wr_id {}, status {})",
                        wc.qp_num,
                        wc.wr_id,
                        verbs::status_name(wc.status)
                    );
                };
                // The opcode of a failed completion is not defined; the send queue is tried first.
                let receive = if wc.status == verbs::IBV_WC_SUCCESS {
                    wc.opcode & verbs::IBV_WC_RECV != 0
                } else {
                    !shape.one_cq && Arc::ptr_eq(cq, &queues.receive)
                };
                if receive {
                    flow.received(wc, queues.srq.as_ref())?;
                    if let Some(s) = &queues.srq {
                        repost(s, wc.wr_id)?;
                    }
                } else {
                    flow.sent(wc)?;
                }
            }
        }
        if flows.iter().all(Flow::finished) {
            return Ok(());
        }
        if progress {
            last = Instant::now();
            idle = 0;
            continue;
        }
        idle += 1;
        if idle % 64 == 0 {
            selftests::sys::yield_now();
        }
        // An event at most now and then, so that posting goes on, too.
        if let (Some(channel), true) = (&queues.channel, idle > 256) {
            for cq in cqs {
                cq.arm(false).map_err(|e| format!("arming a CQ: {e}"))?;
            }
            let mut found = false;
            for cq in cqs {
                // What came before the arming is not announced.
                let n = cq.poll(&mut wcs[..1]).map_err(|e| e.to_string())?;
                if n == 1 {
                    found = true;
                    let wc = wcs[0];
                    let Some(flow) = by_qpn.get(&wc.qp_num).and_then(|i| flows.get_mut(*i)) else {
                        fail!("a completion of QP {:#x}, which does not use this CQ", wc.qp_num);
                    };
                    if wc.opcode & verbs::IBV_WC_RECV != 0 && wc.status == verbs::IBV_WC_SUCCESS {
                        flow.received(&wc, queues.srq.as_ref())?;
                        if let Some(s) = &queues.srq {
                            repost(s, wc.wr_id)?;
                        }
                    } else {
                        flow.sent(&wc)?;
                    }
                }
            }
            // With nothing left to post, the event is the only way on.
            let stuck = flows.iter().all(|f| {
                f.posted == f.mine.ops.len()
                    && (queues.srq.is_some() || f.receives_posted == f.theirs.receives.len())
            });
            if !found {
                let patience = if stuck { ep.wait } else { Duration::from_millis(1) };
                let came = channel.wait(patience).map_err(|e| e.to_string())?;
                if came {
                    last = Instant::now();
                } else if stuck {
                    // A completion without its event is a fault of its own.
                    for cq in cqs {
                        let n = cq.poll(&mut wcs).map_err(|e| e.to_string())?;
                        check!(n == 0, "{n} completions came to an armed CQ and no event announced them");
                    }
                }
            }
            idle = 0;
        }
        if last.elapsed() > ep.wait {
            let mut text = format!("no progress for {} s:", ep.wait.as_secs());
            for f in flows.iter().filter(|f| !f.finished()) {
                text += &format!(
                    "\nQP {:#x}: requests posted {} done {} of {}, receives posted {} done {} of {}, state {:?}",
                    f.lane.qp.number, f.posted, f.done, f.mine.ops.len(), f.receives_posted, f.receives_done, f.theirs.receives.len(), f.lane.qp.state()
                );
                if let Some(op) = f.mine.ops.get(f.done) {
                    text += &format!("\n  waiting for {}", describe(f, op, f.done));
                }
            }
            fail!("{text}\nseed {}", run.seed);
        }
    }
}

fn repost(s: &SrqSlots, slot: u64) -> Outcome {
    let at = slot as usize;
    check!(at < s.count, "wr_id {slot} from a shared queue of {} receives", s.count);
    s.region.memory.set(at * s.slot, s.slot, CANARY);
    s.srq.post_recv(slot, &[s.region.sge(at * s.slot, s.slot)]).map_err(|e| format!("post_srq_recv: {e}"))?;
    Ok(())
}

fn region(ep: &Endpoint, len: usize, access: u32) -> Outcome<Arc<Mr>> {
    let memory = Arc::new(Memory::new(len).map_err(|e| e.to_string())?);
    memory.set(0, memory.len(), CANARY);
    Ok(ep.pd.reg_mr(&memory, 0, len, access).map_err(|e| format!("reg_mr of {len} bytes: {e}"))?)
}

/// One round: new QPs, some batches, everything destroyed again.
fn round(run: &Run, ep: &Endpoint, number: u64) -> Outcome<String> {
    let seed = run.seed;
    // What both devices offer bounds the shape.
    let inline_wish = 236u32;
    let own_sge = u64::try_from(ep.device.max_sge.clamp(1, 16)).unwrap_or(1);
    let agreed = ep
        .oob()
        .exchange(&[
            own_sge,
            ep.device.max_qp_wr as u64,
            u64::from(ep.device.atomic_cap != verbs::IBV_ATOMIC_NONE),
        ])
        .map_err(|e| e.to_string())?;
    let max_sge = own_sge.min(agreed[0]) as usize;
    let max_wr = (ep.device.max_qp_wr as u64).min(agreed[1]).min(u64::from(u32::MAX)) as u32;
    let mut shape = Shape::of(run, max_sge, &mut Rng::of(&[seed, 1, number]));
    shape.depth = shape.depth.min(max_wr);
    shape.limits.atomics &= ep.device.atomic_cap != verbs::IBV_ATOMIC_NONE && agreed[2] == 1;
    let text = format!(
        "{} QPs, {} threads, depth {}, {} SGEs, {} requests up to {} bytes, {} batches{}{}{}{}{}",
        shape.qps,
        shape.threads,
        shape.depth,
        shape.limits.max_sge,
        shape.limits.count,
        shape.limits.max_len,
        shape.batches,
        if shape.srq { ", SRQ" } else { "" },
        if shape.events { ", events" } else { "" },
        if shape.one_cq { ", one CQ" } else { "" },
        if shape.late { ", late receives" } else { "" },
        if shape.relaxed { ", relaxed ordering" } else { "" },
    );
    run.verbose(ep, &format!("round {number}: {text}"));

    // Objects of each thread.
    let per_thread = shape.qps.div_ceil(shape.threads);
    let slots = 64usize;
    let cq_entries = per_thread as u32 * shape.depth * 2 + slots as u32 + 16;
    let mut queues = Vec::new();
    for _ in 0..shape.threads {
        let channel = if shape.events {
            Some(ep.context.create_channel().map_err(|e| format!("create_comp_channel: {e}"))?)
        } else {
            None
        };
        let make = || {
            ep.context
                .create_cq(cq_entries, channel.as_ref())
                .map_err(|e| format!("create_cq of {cq_entries}: {e}"))
        };
        let send = make()?;
        let receive = if shape.one_cq { send.clone() } else { make()? };
        let srq = match shape.limits.slot {
            Some(slot) => {
                let srq = ep.pd.create_srq(slots as u32, 1).map_err(|e| format!("create_srq: {e}"))?;
                let region = region(ep, slot * slots, verbs::IBV_ACCESS_LOCAL_WRITE)?;
                let s = SrqSlots { srq, region, slot, count: slots };
                for i in 0..slots {
                    repost(&s, i as u64)?;
                }
                Some(s)
            }
            None => None,
        };
        queues.push(Queues { send, receive, channel, srq });
    }
    let mut qps = Vec::new();
    for i in 0..shape.qps {
        let q = &queues[i / per_thread];
        let mut init = QpInit::rc(&q.send, &q.receive, shape.depth, shape.limits.max_sge as u32, inline_wish);
        init.signal_all = shape.limits.signal_all;
        init.srq = q.srq.as_ref().map(|s| s.srq.clone());
        let qp = match ep.qp(&init) {
            Ok(qp) => qp,
            // A device without that much inline data.
            Err(_) => {
                init.cap.max_inline_data = 0;
                ep.qp(&init).map_err(|e| format!("create_qp: {e}"))?
            }
        };
        qps.push(qp);
    }
    let inline = qps.iter().map(|q| q.cap.max_inline_data).min().unwrap_or(0);
    let theirs = ep.oob().exchange(&[u64::from(inline)]).map_err(|e| e.to_string())?;
    shape.limits.max_inline = u64::from(inline).min(theirs[0]).min(u64::from(inline_wish)) as usize;
    let l = &shape.limits;
    let mut regions = Vec::new();
    let strict = selftests::endpoint::ALL_ACCESS;
    let relaxed = if shape.relaxed { verbs::IBV_ACCESS_RELAXED_ORDERING } else { 0 };
    for _ in 0..shape.qps {
        regions.push((
            region(ep, l.source, verbs::IBV_ACCESS_LOCAL_WRITE)?,
            region(ep, l.destination, verbs::IBV_ACCESS_LOCAL_WRITE)?,
            region(ep, l.target, strict | relaxed)?,
            region(ep, l.receive, verbs::IBV_ACCESS_LOCAL_WRITE)?,
        ));
    }
    let remotes =
        ep.exchange_memory(&regions.iter().map(|r| &r.2).collect::<Vec<_>>()).map_err(|e| e.to_string())?;
    ep.connect(&qps, &run.tuning()).map_err(|e| format!("connecting: {e}"))?;

    let mut lanes: Vec<Lane> = qps
        .into_iter()
        .zip(regions)
        .zip(remotes)
        .enumerate()
        .map(|(index, ((qp, (source, destination, target, receive)), remote))| Lane {
            index,
            qp,
            source,
            destination,
            target,
            receive,
            remote,
            own_target: vec![CANARY; l.target],
            peer_target: vec![CANARY; l.target],
            own_destination: Vec::new(),
            own_receive: Vec::new(),
        })
        .collect();

    for batch in 0..shape.batches as u64 {
        // Plans of both directions; the leading end's requests are direction 0.
        let mut plans = Vec::new();
        for lane in &mut lanes {
            let plan = |direction: u64, target: &mut Vec<u8>| {
                let mut rng = Rng::of(&[seed, 2, number, batch, lane.index as u64, direction]);
                model::plan(&mut rng, l, target)
            };
            let (own, peer) = if ep.leads { (0, 1) } else { (1, 0) };
            let mine = plan(own, &mut lane.peer_target);
            let theirs = plan(peer, &mut lane.own_target);
            // Memory as it must be before and after.
            for mr in [&lane.destination, &lane.receive] {
                mr.memory.set(0, mr.memory.len(), CANARY);
            }
            lane.own_destination = vec![CANARY; l.destination];
            lane.own_receive = vec![CANARY; l.receive];
            for op in &mine.ops {
                let mut at = 0;
                for (offset, len) in &op.local {
                    if op.kind.returns() {
                        lane.own_destination[*offset..*offset + *len]
                            .copy_from_slice(&op.result[at..at + len]);
                    } else if !op.chained {
                        lane.source.memory.write(*offset, &op.payload[at..at + len]);
                    }
                    at += len;
                }
            }
            for receive in &theirs.receives {
                let op = &theirs.ops[receive.op];
                let carried = if op.kind == Kind::WriteImm { 0 } else { op.len };
                let mut at = 0;
                for (offset, len) in &receive.local {
                    let take = (*len).min(carried - at);
                    lane.own_receive[*offset..*offset + take].copy_from_slice(&op.payload[at..at + take]);
                    at += take;
                }
            }
            plans.push((mine, theirs));
        }
        let mut flows: Vec<Flow> = lanes
            .iter()
            .zip(&plans)
            .map(|(lane, (mine, theirs))| Flow {
                lane,
                mine,
                theirs,
                posted: 0,
                done: 0,
                receives_posted: 0,
                receives_done: 0,
                rng: Rng::of(&[seed, 3, number, batch, lane.index as u64, u64::from(ep.leads)]),
            })
            .collect();
        if !shape.late && !shape.srq {
            for flow in &mut flows {
                flow.post_receives(usize::MAX)?;
            }
        }
        ep.barrier("batch").map_err(|e| e.to_string())?;
        let outcome: Outcome = std::thread::scope(|scope| {
            let handles: Vec<_> = flows
                .chunks_mut(per_thread)
                .zip(&queues)
                .enumerate()
                .map(|(t, (flows, queues))| {
                    let shape = &shape;
                    let seed = rng::mix(seed ^ number << 32 ^ batch << 16 ^ t as u64);
                    scope.spawn(move || work(run, ep, shape, queues, flows, seed))
                })
                .collect();
            let mut outcome = Ok(());
            for handle in handles {
                let this = handle.join().unwrap_or_else(|_| Err("a worker panicked".into()));
                if outcome.is_ok() {
                    outcome = this;
                }
            }
            outcome
        });
        outcome.map_err(|e| match e {
            selftests::ktap::Stop::Fail(text) => {
                format!("round {number} ({text_of}), batch {batch}: {text}", text_of = text_of(&shape)).into()
            }
            other => other,
        })?;
        ep.barrier("done").map_err(|e| e.to_string())?;
        // Nothing may come after the last completion that was due.
        for q in &queues {
            let mut wc = [Wc::default()];
            for cq in [&q.send, &q.receive] {
                let n = cq.poll(&mut wc).map_err(|e| e.to_string())?;
                check!(
                    n == 0,
                    "round {number}, batch {batch}: a completion too many: wr_id {}, QP {:#x}, {}",
                    wc[0].wr_id,
                    wc[0].qp_num,
                    verbs::status_name(wc[0].status)
                );
            }
        }
        for lane in &lanes {
            let regions = [
                ("target", &lane.target, &lane.own_target),
                ("READ destination", &lane.destination, &lane.own_destination),
                ("receive", &lane.receive, &lane.own_receive),
            ];
            for (name, mr, image) in regions {
                if shape.srq && name == "receive" {
                    continue;
                }
                rng::compare(&mr.memory.copy(0, image.len()), image).map_err(|m| {
                    format!(
                        "round {number} ({}), batch {batch}: {name} region of QP {:#x} (lane {}): {m}",
                        text_of(&shape),
                        lane.qp.number,
                        lane.index
                    )
                })?;
            }
        }
        ep.barrier("checked").map_err(|e| e.to_string())?;
    }
    Ok(text)
}

fn text_of(shape: &Shape) -> String {
    format!(
        "{} QPs, {} threads, depth {}, SRQ {}, events {}, late {}",
        shape.qps, shape.threads, shape.depth, shape.srq, shape.events, shape.late
    )
}

/// Rounds until the time is over, at least `least`.
pub fn random(run: &Run, ep: &Endpoint) -> Outcome {
    let end = Instant::now() + run.budget;
    let least = if run.short { 4 } else { 10 };
    let mut number = run.first_round;
    loop {
        // The leading end decides when it is enough.
        let more = number < run.first_round + least || Instant::now() < end;
        let words = ep.oob().exchange(&[u64::from(more)]).map_err(|e| e.to_string())?;
        let more = if ep.leads { more } else { words[0] == 1 };
        if !more {
            run.note(ep, &format!("{} random rounds", number - run.first_round));
            return Ok(());
        }
        round(run, ep, number)?;
        number += 1;
    }
}
