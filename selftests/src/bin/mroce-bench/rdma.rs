// SPDX-License-Identifier: GPL-2.0
//! The RDMA tests.

#![forbid(unsafe_code)]

use crate::probe::Probe;
use crate::{bandwidth_values, latency_values, Plan, Test, Values, Watch};
use selftests::endpoint::{Endpoint, Remote, Tuning, ALL_ACCESS};
use selftests::sys;
use selftests::verbs::{self, Channel, Mr, Prepared, Qp, QpInit, SendWr, Wc};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Round trips between two looks at the clock.
const GROUP: u64 = 4;

fn status(wc: &Wc, what: &str) -> Result<(), String> {
    if wc.status != verbs::IBV_WC_SUCCESS {
        return Err(format!("{what}: {} (wr_id {})", verbs::status_name(wc.status), wc.wr_id));
    }
    Ok(())
}

struct Setup {
    qps: Vec<Arc<Qp>>,
    mr: Arc<Mr>,
    remote: Remote,
    /// Of the completions for which the test waits by events.
    channel: Option<Arc<Channel>>,
    /// Bytes of a slot of the region.
    slot: usize,
}

/// Completions for which a test waits by events; it polls for the others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Events {
    None,
    Sends,
    Receives,
}

/// QPs that share one CQ for sends and one for receives, and a region of `depth` slots twice:
/// the first half is read from, the second written to.
fn setup(ep: &Endpoint, plan: &Plan, test: &Test, depth: usize, events: Events) -> Result<Setup, String> {
    let entries = (depth * test.qps * 2 + 16) as u32;
    let channel = match events {
        Events::None => None,
        _ => Some(ep.context.create_channel().map_err(|e| format!("create_comp_channel: {e}"))?),
    };
    let cq = |of: Events| {
        let channel = channel.as_ref().filter(|_| events == of);
        ep.context.create_cq(entries, channel).map_err(|e| format!("create_cq of {entries}: {e}"))
    };
    let (send_cq, receive_cq) = (cq(Events::Sends)?, cq(Events::Receives)?);
    let mut qps = Vec::new();
    for _ in 0..test.qps {
        let wish = if test.size <= 64 { 64 } else { 0 };
        let init = |inline| QpInit::rc(&send_cq, &receive_cq, depth as u32, 1, inline);
        let qp = ep.qp(&init(wish)).or_else(|_| ep.qp(&init(0))).map_err(|e| format!("create_qp: {e}"))?;
        qps.push(qp);
    }
    let slot = test.size.next_multiple_of(64);
    // A window that stays within the cache where that is possible.
    let slots = depth.min(((8 << 20) / slot).max(2));
    let mr = ep.memory(slot * slots * 2, ALL_ACCESS).map_err(|e| format!("reg_mr: {e}"))?;
    mr.memory.set(0, slot * slots, 0x5a);
    let remote =
        *ep.exchange_memory(&[&mr]).map_err(|e| e.to_string())?.first().ok_or("no key from the other end")?;
    ep.connect(&qps, &Tuning { timeout: plan.timeout, ..Tuning::default() })
        .map_err(|e| format!("connecting: {e}"))?;
    Ok(Setup { qps, mr, remote, channel, slot })
}

/// Runs one test; values on the leading end.
pub fn run(ep: &Endpoint, plan: &Plan, test: &Test) -> Result<Values, String> {
    let values = match test.name.as_str() {
        "write_bw" | "write_rate" => stream(ep, plan, test, verbs::IBV_WR_RDMA_WRITE),
        "read_bw" => stream(ep, plan, test, verbs::IBV_WR_RDMA_READ),
        "send_bw" | "send_rate" => stream(ep, plan, test, verbs::IBV_WR_SEND),
        "write_lat" => write_latency(ep, plan, test),
        "send_lat" => send_latency(ep, plan, test, false),
        "send_event_lat" => send_latency(ep, plan, test, true),
        "read_lat" => read_latency(ep, plan, test),
        other => Err(format!("no test '{other}'")),
    }?;
    ep.barrier("test done").map_err(|e| e.to_string())?;
    Ok(values)
}

/// A window of requests in flight on each QP.
fn stream(ep: &Endpoint, plan: &Plan, test: &Test, opcode: u32) -> Result<Values, String> {
    let depth = test.depth;
    let sends = opcode == verbs::IBV_WR_SEND;
    let mut probe = plan.telemetry.map(Probe::new).transpose()?;
    let events = if probe.is_some() { Events::Sends } else { Events::None };
    let s = setup(ep, plan, test, if sends { depth * 2 } else { depth }, events)?;
    let slots = s.mr.len / s.slot / 2;
    let far = slots * s.slot;
    if sends && !ep.leads {
        for qp in &s.qps {
            for i in 0..depth * 2 {
                qp.post_recv(i as u64, &[s.mr.sge(far + i % slots * s.slot, test.size)])
                    .map_err(|e| format!("post_recv: {e}"))?;
            }
        }
    }
    ep.barrier("go").map_err(|e| e.to_string())?;
    if !ep.leads {
        if sends {
            swallow(ep, plan, test, &s, slots)?;
        }
        ep.barrier("stopped").map_err(|e| e.to_string())?;
        return Ok(Values::new());
    }
    // Batches of requests, the last of each signaled; two batches at least make a window.
    let batch = (depth / 4).clamp(1, 32);
    let batches = (depth / batch).max(1);
    let inline = |qp: &Qp| opcode != verbs::IBV_WR_RDMA_READ && test.size <= qp.cap.max_inline_data as usize;
    let request = |qp: &Qp, i: usize| SendWr {
        wr_id: i as u64,
        sges: vec![s.mr.sge(i % slots * s.slot, test.size)],
        opcode,
        flags: if inline(qp) { verbs::IBV_SEND_INLINE } else { 0 },
        remote_addr: s.remote.addr + (far + i % slots * s.slot) as u64,
        rkey: s.remote.rkey,
        ..SendWr::default()
    };
    let mut prepared: Vec<Vec<Prepared>> = s
        .qps
        .iter()
        .enumerate()
        .map(|(q, qp)| {
            (0..batches)
                .map(|b| {
                    let mut list: Vec<SendWr> = (0..batch).map(|i| request(qp, b * batch + i)).collect();
                    if let Some(last) = list.last_mut() {
                        last.flags |= verbs::IBV_SEND_SIGNALED;
                        last.wr_id = q as u64;
                    }
                    Prepared::new(&list)
                })
                .collect()
        })
        .collect();
    let mut next = vec![0usize; s.qps.len()];
    for (q, qp) in s.qps.iter().enumerate() {
        for p in &mut prepared[q] {
            qp.post_prepared(p).map_err(|e| e.to_string())?;
        }
    }
    let mut flying = s.qps.len() * batches;
    let mut wcs = vec![Wc::default(); 32];
    let mut watch = Watch::new(plan.wait);
    let cq = &s.qps[0].send_cq;
    let begin = Instant::now();
    let mut from: Option<(Instant, Duration)> = None;
    let (mut done, mut last, mut cpu) = (0u64, begin, Duration::ZERO);
    let mut over = false;
    let (mut moved, mut gap) = (begin, Duration::ZERO);
    while flying > 0 {
        let n = cq.poll(&mut wcs).map_err(|e| e.to_string())?;
        if n == 0 {
            if let Some(probe) = &mut probe {
                probe.rest(cq, &s.qps[0])?;
            }
            watch.idle("stream")?;
            continue;
        }
        watch.moved();
        let now = Instant::now();
        if from.is_some() && !over {
            gap = gap.max(now.duration_since(moved));
        }
        moved = now;
        if !over {
            match from {
                None if now.duration_since(begin) >= plan.warmup => {
                    from = Some((now, sys::cpu_time()));
                    if let Some(probe) = &mut probe {
                        probe.begin(&s.qps[0])?;
                    }
                }
                None => {}
                Some((at, used)) => {
                    done += n as u64 * batch as u64;
                    last = now;
                    if now.duration_since(at) >= plan.time {
                        over = true;
                        cpu = sys::cpu_time() - used;
                        if let Some(probe) = &mut probe {
                            probe.end(&s.qps[0])?;
                        }
                    }
                }
            }
        }
        for wc in &wcs[..n] {
            status(wc, "stream")?;
            let q = wc.wr_id as usize;
            if over {
                flying -= 1;
            } else {
                let b = next[q];
                next[q] = (b + 1) % batches;
                s.qps[q].post_prepared(&mut prepared[q][b]).map_err(|e| e.to_string())?;
            }
        }
    }
    if sends {
        // Tells the receiver that this was all.
        let wr = SendWr {
            opcode: verbs::IBV_WR_SEND_WITH_IMM,
            flags: verbs::IBV_SEND_SIGNALED,
            imm: 1,
            ..SendWr::default()
        };
        s.qps[0].post_send(&[wr]).map_err(|e| e.to_string())?;
        let wc =
            cq.poll_one(plan.wait).map_err(|e| e.to_string())?.ok_or("the last Send did not complete")?;
        status(&wc, "last Send")?;
    }
    ep.barrier("stopped").map_err(|e| e.to_string())?;
    let time = from.map_or(Duration::ZERO, |(at, _)| last.duration_since(at));
    let mut values = bandwidth_values(done as f64 * test.size as f64, done as f64, time, cpu);
    values.push(("gap_ms", gap.as_secs_f64() * 1e3));
    values.extend(probe.iter().flat_map(Probe::values));
    Ok(values)
}

/// Takes Sends until one says that it is the last.
fn swallow(_ep: &Endpoint, plan: &Plan, test: &Test, s: &Setup, slots: usize) -> Result<(), String> {
    let far = slots * s.slot;
    let cq = &s.qps[0].recv_cq;
    let by_number: std::collections::HashMap<u32, &Arc<Qp>> =
        s.qps.iter().map(|qp| (qp.number, qp)).collect();
    let mut wcs = vec![Wc::default(); 32];
    let mut watch = Watch::new(plan.wait + plan.time + plan.warmup);
    loop {
        let n = cq.poll(&mut wcs).map_err(|e| e.to_string())?;
        if n == 0 {
            watch.idle("receiving")?;
            continue;
        }
        watch.moved();
        for wc in &wcs[..n] {
            status(wc, "receive")?;
            if wc.wc_flags & verbs::IBV_WC_WITH_IMM != 0 {
                return Ok(());
            }
            let qp = by_number.get(&wc.qp_num).ok_or("a completion of an unknown QP")?;
            let sge = s.mr.sge(far + wc.wr_id as usize % slots * s.slot, test.size);
            qp.post_recv(wc.wr_id, &[sge]).map_err(|e| format!("post_recv: {e}"))?;
        }
    }
}

/// Both ends write to each other in turn and poll the last byte.
fn write_latency(ep: &Endpoint, plan: &Plan, test: &Test) -> Result<Values, String> {
    let s = setup(ep, plan, test, 16, Events::None)?;
    let qp = &s.qps[0];
    let far = s.mr.len / 2;
    let inline = if test.size <= qp.cap.max_inline_data as usize { verbs::IBV_SEND_INLINE } else { 0 };
    let wr = SendWr {
        sges: vec![s.mr.sge(0, test.size)],
        opcode: verbs::IBV_WR_RDMA_WRITE,
        flags: verbs::IBV_SEND_SIGNALED | inline,
        remote_addr: s.remote.addr + far as u64,
        rkey: s.remote.rkey,
        ..SendWr::default()
    };
    let mut prepared = Prepared::new(&[wr]);
    let mut wc = [Wc::default()];
    let mut watch = Watch::new(plan.wait);
    let last_byte = far + test.size - 1;
    // Trip i is marked by i % 250 + 1; the mark 255 ends the test.
    let mut send = |mark: u8| -> Result<(), String> {
        s.mr.memory.set(test.size - 1, 1, mark);
        qp.post_prepared(&mut prepared).map_err(|e| e.to_string())
    };
    let mut reap = |n: u64| -> Result<(), String> {
        // The previous Write is done when its answer has come; its completion may be a moment late.
        let mut watch = Watch::new(plan.wait);
        let mut left = n;
        while left > 0 {
            if qp.send_cq.poll(&mut wc).map_err(|e| e.to_string())? == 1 {
                status(&wc[0], "Write")?;
                left -= 1;
            } else {
                watch.idle("completion")?;
            }
        }
        Ok(())
    };
    let mut wait_mark = |previous: u8| -> Result<u8, String> {
        loop {
            let seen = s.mr.memory.byte(last_byte);
            if seen != previous {
                watch.moved();
                return Ok(seen);
            }
            watch.idle("polling memory")?;
        }
    };
    ep.barrier("go").map_err(|e| e.to_string())?;
    let mut groups = Vec::new();
    let begin = Instant::now();
    let mut at = begin;
    let mut previous = 0;
    let mut i = 0u64;
    loop {
        let mark = (i % 250) as u8 + 1;
        if ep.leads {
            send(mark)?;
            previous = wait_mark(previous)?;
            reap(1)?;
            i += 1;
            if i % GROUP == 0 {
                let now = Instant::now();
                if now.duration_since(begin) > plan.warmup {
                    groups.push(now.duration_since(at));
                }
                at = now;
                if now.duration_since(begin) > plan.warmup + plan.time {
                    send(255)?;
                    reap(1)?;
                    break;
                }
            }
        } else {
            previous = wait_mark(previous)?;
            if previous == 255 {
                break;
            }
            send(mark)?;
            reap(1)?;
            i += 1;
        }
    }
    ep.barrier("stopped").map_err(|e| e.to_string())?;
    Ok(latency_values(groups, GROUP as f64 * 2.0))
}

/// Both ends send to each other in turn.
fn send_latency(ep: &Endpoint, plan: &Plan, test: &Test, events: bool) -> Result<Values, String> {
    let wait = if events { Events::Receives } else { Events::None };
    let s = setup(ep, plan, test, 16, wait)?;
    let qp = &s.qps[0];
    let far = s.mr.len / 2;
    let inline = if test.size <= qp.cap.max_inline_data as usize { verbs::IBV_SEND_INLINE } else { 0 };
    let send = |imm: bool| SendWr {
        sges: vec![s.mr.sge(0, test.size)],
        opcode: if imm { verbs::IBV_WR_SEND_WITH_IMM } else { verbs::IBV_WR_SEND },
        flags: verbs::IBV_SEND_SIGNALED | verbs::IBV_SEND_SOLICITED | inline,
        imm: 1,
        ..SendWr::default()
    };
    let mut prepared = Prepared::new(&[send(false)]);
    let receive = || qp.post_recv(0, &[s.mr.sge(far, test.size)]).map_err(|e| format!("post_recv: {e}"));
    for _ in 0..8 {
        receive()?;
    }
    let mut wc = [Wc::default()];
    let mut watch = Watch::new(plan.wait);
    let mut take = |armed: bool| -> Result<bool, String> {
        loop {
            if qp.recv_cq.poll(&mut wc).map_err(|e| e.to_string())? == 1 {
                watch.moved();
                status(&wc[0], "receive")?;
                return Ok(wc[0].wc_flags & verbs::IBV_WC_WITH_IMM != 0);
            }
            match &s.channel {
                Some(channel) if armed => {
                    if !channel.wait(plan.wait).map_err(|e| e.to_string())? {
                        return Err(format!("no event within {} s", plan.wait.as_secs()));
                    }
                    // For the next one; a completion between the two is found by the next poll.
                    qp.recv_cq.arm(false).map_err(|e| e.to_string())?;
                }
                _ => watch.idle("receive")?,
            }
        }
    };
    let mut reaped = [Wc::default()];
    let mut reap = || -> Result<(), String> {
        let mut watch = Watch::new(plan.wait);
        while qp.send_cq.poll(&mut reaped).map_err(|e| e.to_string())? == 0 {
            watch.idle("completion of a Send")?;
        }
        status(&reaped[0], "Send")
    };
    if events {
        qp.recv_cq.arm(false).map_err(|e| e.to_string())?;
    }
    ep.barrier("go").map_err(|e| e.to_string())?;
    let mut groups = Vec::new();
    let begin = Instant::now();
    let mut at = begin;
    let mut i = 0u64;
    loop {
        if ep.leads {
            qp.post_prepared(&mut prepared).map_err(|e| e.to_string())?;
            take(events)?;
            receive()?;
            reap()?;
            i += 1;
            if i % GROUP == 0 {
                let now = Instant::now();
                if now.duration_since(begin) > plan.warmup {
                    groups.push(now.duration_since(at));
                }
                at = now;
                if now.duration_since(begin) > plan.warmup + plan.time {
                    qp.post_send(&[send(true)]).map_err(|e| e.to_string())?;
                    reap()?;
                    break;
                }
            }
        } else {
            if take(events)? {
                break;
            }
            qp.post_prepared(&mut prepared).map_err(|e| e.to_string())?;
            receive()?;
            reap()?;
        }
    }
    ep.barrier("stopped").map_err(|e| e.to_string())?;
    Ok(latency_values(groups, GROUP as f64 * 2.0))
}

/// One READ after the other.
fn read_latency(ep: &Endpoint, plan: &Plan, test: &Test) -> Result<Values, String> {
    let s = setup(ep, plan, test, 16, Events::None)?;
    let qp = &s.qps[0];
    ep.barrier("go").map_err(|e| e.to_string())?;
    let mut groups = Vec::new();
    if ep.leads {
        let wr = SendWr {
            sges: vec![s.mr.sge(0, test.size)],
            opcode: verbs::IBV_WR_RDMA_READ,
            flags: verbs::IBV_SEND_SIGNALED,
            remote_addr: s.remote.addr,
            rkey: s.remote.rkey,
            ..SendWr::default()
        };
        let mut prepared = Prepared::new(&[wr]);
        let begin = Instant::now();
        let mut at = begin;
        while at.duration_since(begin) < plan.warmup + plan.time {
            for _ in 0..GROUP {
                qp.post_prepared(&mut prepared).map_err(|e| e.to_string())?;
                let mut watch = Watch::new(plan.wait);
                let mut wc = [Wc::default()];
                while qp.send_cq.poll(&mut wc).map_err(|e| e.to_string())? == 0 {
                    watch.idle("READ")?;
                }
                status(&wc[0], "READ")?;
            }
            let now = Instant::now();
            if now.duration_since(begin) > plan.warmup {
                groups.push(now.duration_since(at));
            }
            at = now;
        }
    }
    ep.barrier("stopped").map_err(|e| e.to_string())?;
    Ok(latency_values(groups, GROUP as f64))
}
