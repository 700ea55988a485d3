// SPDX-License-Identifier: GPL-2.0
//! Objects that many share: completion queues and their events, shared receive queues,
//! counters under atomics, one QP under many threads, many QPs at once.

#![forbid(unsafe_code)]

use crate::Run;
use selftests::endpoint::{Endpoint, ALL_ACCESS};
use selftests::ktap::Outcome;
use selftests::rng::Rng;
use selftests::single::Single;
use selftests::sys::{self, errno, errno_name};
use selftests::verbs::{self, Qp, QpInit, SendWr, Wc};
use selftests::{check, fail, skip};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A CQ that is made larger and smaller while completions wait in it keeps them in order.
pub fn cq_resize(run: &Run, ep: &Endpoint) -> Outcome {
    let single = Single::new(ep, &run.tuning(), 32, 1, 0)?;
    let mr = ep.memory(4096, ALL_ACCESS).map_err(|e| e.to_string())?;
    let remote = ep.exchange_memory(&[&mr]).map_err(|e| e.to_string())?[0];
    let cq = &single.qp.send_cq;
    let supported = cq.resize(64);
    let both = ep.oob().exchange(&[u64::from(supported.is_ok())]).map_err(|e| e.to_string())?;
    if let Err(error) = supported {
        let code = error.raw_os_error().unwrap_or(0);
        check!(code == errno::EOPNOTSUPP || code == errno::ENOSYS, "resize_cq: {error}");
        skip!("resize_cq is not supported");
    }
    if both[0] == 0 {
        skip!("the other end has no resize_cq");
    }
    let mut next = 0;
    let mut due = 0;
    for entries in [256, 100, 40, 1000, 64] {
        let list: Vec<SendWr> = (0..16)
            .map(|i| SendWr {
                wr_id: next + i,
                sges: vec![mr.sge(0, 64)],
                opcode: verbs::IBV_WR_RDMA_WRITE,
                flags: verbs::IBV_SEND_SIGNALED,
                remote_addr: remote.addr + 2048,
                rkey: remote.rkey,
                ..SendWr::default()
            })
            .collect();
        next += 16;
        single.qp.post_send(&list).map_err(|e| format!("{e}"))?;
        // Some are taken before, the rest waits (or is still to come) during the change.
        for _ in 0..5 {
            let wc = single.success(ep, "before resize_cq")?;
            check!(wc.wr_id == due, "wr_id {} instead of {due}", wc.wr_id);
            due += 1;
        }
        cq.resize(entries).map_err(|e| format!("resize_cq to {entries}: {e}"))?;
        check!(cq.entries() >= entries, "resize_cq to {entries} left {}", cq.entries());
        for _ in 0..11 {
            let wc = single.success(ep, "after resize_cq")?;
            check!(wc.wr_id == due, "after resize_cq to {entries}: wr_id {} instead of {due}", wc.wr_id);
            due += 1;
        }
        let mut wc = [Wc::default()];
        check!(cq.poll(&mut wc).map_err(|e| e.to_string())? == 0, "a completion too many after resize_cq");
    }
    ep.barrier("resized").map_err(|e| e.to_string())?;
    Ok(())
}

/// Events: one for each arming, none for unsolicited messages when only solicited ones count.
pub fn events(run: &Run, ep: &Endpoint) -> Outcome {
    let channel = ep.context.create_channel().map_err(|e| format!("create_comp_channel: {e}"))?;
    let send_cq = ep.cq(64).map_err(|e| e.to_string())?;
    let cq = ep.context.create_cq(64, Some(&channel)).map_err(|e| format!("create_cq: {e}"))?;
    let qp = ep.qp(&QpInit::rc(&send_cq, &cq, 32, 1, 0)).map_err(|e| format!("create_qp: {e}"))?;
    let mr = ep.memory(4096, ALL_ACCESS).map_err(|e| e.to_string())?;
    let remote = ep.exchange_memory(&[&mr]).map_err(|e| e.to_string())?[0];
    for i in 0..16 {
        qp.post_recv(i, &[mr.sge(0, 1024)]).map_err(|e| format!("post_recv: {e}"))?;
    }
    ep.connect(&[qp.clone()], &run.tuning()).map_err(|e| format!("connecting: {e}"))?;
    // (request, flags, armed for solicited only, an event is due)
    let se = verbs::IBV_SEND_SOLICITED;
    let steps = [
        (verbs::IBV_WR_SEND, 0, Some(false), true),
        (verbs::IBV_WR_SEND, se, Some(false), true),
        (verbs::IBV_WR_SEND, 0, Some(true), false),
        // Still armed.
        (verbs::IBV_WR_SEND, se, None, true),
        // The event took the arming with it.
        (verbs::IBV_WR_SEND, se, None, false),
        (verbs::IBV_WR_RDMA_WRITE_WITH_IMM, se, Some(true), true),
        (verbs::IBV_WR_RDMA_WRITE_WITH_IMM, 0, Some(true), false),
        (verbs::IBV_WR_SEND_WITH_IMM, se, None, true),
        // Armed for everything stays so when it is armed for solicited ones in addition.
        (verbs::IBV_WR_SEND, 0, Some(false), true),
    ];
    for (n, (opcode, flags, arm, due)) in steps.into_iter().enumerate() {
        let what = format!("step {n} (opcode {opcode}, solicited {}, armed {arm:?})", flags != 0);
        if ep.leads {
            ep.barrier("armed").map_err(|e| e.to_string())?;
            let wr = SendWr {
                sges: vec![mr.sge(2048, 100)],
                opcode,
                flags: flags | verbs::IBV_SEND_SIGNALED,
                remote_addr: remote.addr + 3000,
                rkey: remote.rkey,
                ..SendWr::default()
            };
            qp.post_send(&[wr]).map_err(|e| format!("{what}: {e}"))?;
            let wc = send_cq.poll_one(ep.wait).map_err(|e| e.to_string())?;
            check!(
                wc.is_some_and(|wc| wc.status == verbs::IBV_WC_SUCCESS),
                "{what}: the send did not complete"
            );
            ep.barrier("sent").map_err(|e| e.to_string())?;
            continue;
        }
        if let Some(solicited) = arm {
            cq.arm(solicited).map_err(|e| format!("{what}: req_notify_cq: {e}"))?;
        }
        ep.barrier("armed").map_err(|e| e.to_string())?;
        if due {
            check!(channel.wait(ep.wait).map_err(|e| e.to_string())?, "{what}: no event");
        }
        ep.barrier("sent").map_err(|e| e.to_string())?;
        let wc = cq.poll_one(ep.wait).map_err(|e| e.to_string())?;
        check!(
            wc.is_some_and(|wc| wc.status == verbs::IBV_WC_SUCCESS),
            "{what}: the receive did not complete"
        );
        // The completion is there, so an event that was due to come has come.
        let more = channel.wait(Duration::from_millis(20)).map_err(|e| e.to_string())?;
        check!(!more, "{what}: an event {}", if due { "too many" } else { "that must not come" });
    }
    ep.barrier("events done").map_err(|e| e.to_string())?;
    Ok(())
}

/// The limit event of a shared receive queue: once, when fewer receives are left; then disarmed.
pub fn srq_limit(run: &Run, ep: &Endpoint) -> Outcome {
    let srq = match ep.pd.create_srq(32, 1) {
        Ok(srq) => srq,
        Err(error) => skip!("create_srq: {error}"),
    };
    let cq = ep.cq(128).map_err(|e| e.to_string())?;
    let mut qps = Vec::new();
    for _ in 0..3 {
        let mut init = QpInit::rc(&cq, &cq, 16, 1, 0);
        init.srq = Some(srq.clone());
        qps.push(ep.qp(&init).map_err(|e| format!("create_qp with SRQ: {e}"))?);
    }
    let mr = ep.memory(65536, ALL_ACCESS).map_err(|e| e.to_string())?;
    for i in 0..20 {
        srq.post_recv(i, &[mr.sge(i as usize * 1024, 1024)]).map_err(|e| format!("post_srq_recv: {e}"))?;
    }
    ep.connect(&qps, &run.tuning()).map_err(|e| format!("connecting: {e}"))?;
    if ep.leads {
        ep.barrier("armed").map_err(|e| e.to_string())?;
        for i in 0..15u64 {
            mr.memory.fill(30_000, 500, i);
            let wr = SendWr {
                sges: vec![mr.sge(30_000, 500)],
                opcode: verbs::IBV_WR_SEND,
                flags: verbs::IBV_SEND_SIGNALED,
                ..SendWr::default()
            };
            qps[i as usize % 3].post_send(&[wr]).map_err(|e| format!("{e}"))?;
            let wc = cq.poll_one(ep.wait).map_err(|e| e.to_string())?;
            check!(wc.is_some_and(|wc| wc.status == verbs::IBV_WC_SUCCESS), "Send {i} did not complete");
            ep.barrier("one").map_err(|e| e.to_string())?;
            ep.barrier("looked").map_err(|e| e.to_string())?;
        }
        return Ok(());
    }
    srq.set_limit(10).map_err(|e| format!("modify_srq: {e}"))?;
    check!(srq.limit().map_err(|e| e.to_string())? == 10, "query_srq does not give the limit back");
    ep.barrier("armed").map_err(|e| e.to_string())?;
    let mut seen = None;
    for i in 0..15u64 {
        ep.barrier("one").map_err(|e| e.to_string())?;
        let wc = cq.poll_one(ep.wait).map_err(|e| e.to_string())?;
        let Some(wc) = wc else { fail!("receive {i} did not complete") };
        check!(wc.status == verbs::IBV_WC_SUCCESS, "receive {i}: {}", verbs::status_name(wc.status));
        check!(wc.qp_num == qps[i as usize % 3].number, "receive {i}: QP {:#x}", wc.qp_num);
        mr.memory.verify(wc.wr_id as usize * 1024, 500, i).map_err(|m| format!("receive {i}: {m}"))?;
        // 20 were posted; fewer than 10 are left after the 11th.
        let patience = if i == 10 { ep.wait } else { Duration::from_millis(if i < 10 { 0 } else { 50 }) };
        while let Some((event, _)) = ep
            .context
            .next_event(if seen.is_some() { Duration::ZERO } else { patience })
            .map_err(|e| e.to_string())?
        {
            if event == verbs::IBV_EVENT_SRQ_LIMIT_REACHED {
                check!(seen.is_none(), "a second limit event without arming, after receive {i}");
                check!(i >= 10, "the limit event came after {} of 20 receives, the limit is 10", i + 1);
                seen = Some(i);
            }
        }
        ep.barrier("looked").map_err(|e| e.to_string())?;
    }
    check!(seen.is_some(), "no limit event");
    check!(srq.limit().map_err(|e| e.to_string())? == 0, "the limit is still armed after its event");
    Ok(())
}

/// Counters under fetch-and-add and compare-and-swap from many QPs and threads: every value is
/// given out once, the sum is right.
pub fn atomic_sum(run: &Run, ep: &Endpoint) -> Outcome {
    let both = ep
        .oob()
        .exchange(&[u64::from(ep.device.atomic_cap != verbs::IBV_ATOMIC_NONE)])
        .map_err(|e| e.to_string())?;
    if ep.device.atomic_cap == verbs::IBV_ATOMIC_NONE || both[0] == 0 {
        skip!("no atomics");
    }
    let threads = 4;
    let mut qps = Vec::new();
    for _ in 0..threads {
        let cq = ep.cq(64).map_err(|e| e.to_string())?;
        qps.push(ep.qp(&QpInit::rc(&cq, &cq, 32, 1, 0)).map_err(|e| format!("create_qp: {e}"))?);
    }
    // Word 0 counts fetch-and-adds, word 1 is raised by compare-and-swap.
    let counter = ep.memory(4096, ALL_ACCESS).map_err(|e| e.to_string())?;
    let results = ep.memory(4096 * threads, verbs::IBV_ACCESS_LOCAL_WRITE).map_err(|e| e.to_string())?;
    let remote = ep.exchange_memory(&[&counter]).map_err(|e| e.to_string())?[0];
    ep.connect(&qps, &run.tuning()).map_err(|e| format!("connecting: {e}"))?;
    let per_thread = if run.short { 60u64 } else { 1000 };
    let deadline = Instant::now() + run.budget.max(Duration::from_secs(1));
    let work = |t: usize| -> Outcome<(Vec<u64>, u64)> {
        let qp = &qps[t];
        let mut values = Vec::new();
        let mut swaps = 0u64;
        let mut guess = 0u64;
        let base = t * 4096;
        let take = |what: &str| -> Outcome<Wc> {
            let wc = qp.send_cq.poll_one(ep.wait).map_err(|e| e.to_string())?;
            let Some(wc) = wc else { fail!("{what}: no completion") };
            check!(wc.status == verbs::IBV_WC_SUCCESS, "{what}: {}", verbs::status_name(wc.status));
            Ok(wc)
        };
        let mut n = 0;
        while n < per_thread && Instant::now() < deadline {
            // Eight at once in flight, then one compare-and-swap.
            let list: Vec<SendWr> = (0..8u64)
                .map(|i| SendWr {
                    wr_id: i,
                    sges: vec![results.sge(base + i as usize * 8, 8)],
                    opcode: verbs::IBV_WR_ATOMIC_FETCH_AND_ADD,
                    flags: verbs::IBV_SEND_SIGNALED,
                    remote_addr: remote.addr,
                    rkey: remote.rkey,
                    compare_add: 1,
                    ..SendWr::default()
                })
                .collect();
            qp.post_send(&list).map_err(|e| format!("{e}"))?;
            for i in 0..8u64 {
                let wc = take("fetch-and-add")?;
                check!(wc.wr_id == i, "fetch-and-add {i}: wr_id {}", wc.wr_id);
                values.push(results.memory.word(base + i as usize * 8));
            }
            n += 8;
            let swap = SendWr {
                sges: vec![results.sge(base + 512, 8)],
                opcode: verbs::IBV_WR_ATOMIC_CMP_AND_SWP,
                flags: verbs::IBV_SEND_SIGNALED,
                remote_addr: remote.addr + 8,
                rkey: remote.rkey,
                compare_add: guess,
                swap: guess + 1,
                ..SendWr::default()
            };
            qp.post_send(&[swap]).map_err(|e| format!("{e}"))?;
            take("compare-and-swap")?;
            let old = results.memory.word(base + 512);
            if old == guess {
                swaps += 1;
                guess += 1;
            } else {
                guess = old;
            }
        }
        Ok((values, swaps))
    };
    let outcomes: Vec<Outcome<(Vec<u64>, u64)>> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|t| scope.spawn(move || work(t))).collect();
        handles.into_iter().map(|h| h.join().unwrap_or_else(|_| Err("a thread panicked".into()))).collect()
    });
    let mut values = Vec::new();
    let mut swaps = 0;
    for outcome in outcomes {
        let (v, s) = outcome?;
        // Each QP sees its own in rising order.
        check!(v.windows(2).all(|w| w[0] < w[1]), "a QP's fetch-and-add results do not rise");
        values.extend(v);
        swaps += s;
    }
    let theirs = ep.oob().exchange(&[values.len() as u64, swaps]).map_err(|e| e.to_string())?;
    values.sort_unstable();
    if let Some((i, v)) = values.iter().enumerate().find(|(i, v)| *i as u64 != **v) {
        fail!("{} fetch-and-adds: value {i} was not given out once, {v} follows", values.len());
    }
    check!(
        counter.memory.word(0) == theirs[0],
        "the counter is {}, the other end added {}",
        counter.memory.word(0),
        theirs[0]
    );
    check!(
        counter.memory.word(8) == theirs[1],
        "the swapped word is {}, the other end swapped {} times",
        counter.memory.word(8),
        theirs[1]
    );
    run.note(ep, &format!("{} fetch-and-adds, {swaps} swaps that hit", values.len()));
    Ok(())
}

/// Many threads post to one QP and share its CQ: each thread's requests complete in its order,
/// none is lost, a full queue is refused with ENOMEM.
pub fn many_threads(run: &Run, ep: &Endpoint) -> Outcome {
    let threads = 6usize;
    let cq = ep.cq(256).map_err(|e| e.to_string())?;
    let qp = ep.qp(&QpInit::rc(&cq, &cq, 16, 1, 0)).map_err(|e| format!("create_qp: {e}"))?;
    let area = 16384usize;
    let source = ep.memory(threads * area, ALL_ACCESS).map_err(|e| e.to_string())?;
    let target = ep.memory(threads * area, ALL_ACCESS).map_err(|e| e.to_string())?;
    let remote = ep.exchange_memory(&[&target]).map_err(|e| e.to_string())?[0];
    ep.connect(&[qp.clone()], &run.tuning()).map_err(|e| format!("connecting: {e}"))?;
    let count = if run.short { 100u64 } else { 1500 };
    let stop = AtomicBool::new(false);
    let full = AtomicU64::new(0);
    let posting = |t: usize| -> Outcome {
        for i in 0..count {
            let len = Rng::of(&[run.seed, 60, t as u64, i]).range(1, 3000) as usize;
            let wr = SendWr {
                wr_id: (t as u64) << 32 | i,
                sges: vec![source.sge(t * area, len)],
                opcode: if i % 3 == 2 { verbs::IBV_WR_RDMA_READ } else { verbs::IBV_WR_RDMA_WRITE },
                flags: verbs::IBV_SEND_SIGNALED,
                remote_addr: remote.addr + (t * area) as u64,
                rkey: remote.rkey,
                ..SendWr::default()
            };
            let since = Instant::now();
            loop {
                match qp.post_send(std::slice::from_ref(&wr)) {
                    Ok(()) => break,
                    Err(e) if e.error.raw_os_error() == Some(errno::ENOMEM) => {
                        full.fetch_add(1, Ordering::Relaxed);
                        sys::yield_now();
                        if stop.load(Ordering::Relaxed) || since.elapsed() > ep.wait {
                            fail!("thread {t}: the send queue stays full at request {i}");
                        }
                    }
                    Err(e) => fail!(
                        "thread {t} request {i}: {} ({e})",
                        errno_name(e.error.raw_os_error().unwrap_or(0))
                    ),
                }
            }
        }
        Ok(())
    };
    // The source of thread t repeats its pattern, so what is read back is what was written.
    for t in 0..threads {
        source.memory.fill(t * area, area, run.seed ^ t as u64);
        target.memory.fill(t * area, area, run.seed ^ t as u64);
    }
    ep.barrier("filled").map_err(|e| e.to_string())?;
    let outcome: Outcome = std::thread::scope(|scope| {
        let posting = &posting;
        let handles: Vec<_> = (0..threads).map(|t| scope.spawn(move || posting(t))).collect();
        let result = (|| {
            let mut next = vec![0u64; threads];
            for _ in 0..count * threads as u64 {
                let wc = cq.poll_one(ep.wait).map_err(|e| e.to_string())?;
                let Some(wc) = wc else {
                    fail!("completions stop after {} of {}", next.iter().sum::<u64>(), count * threads as u64)
                };
                check!(
                    wc.status == verbs::IBV_WC_SUCCESS,
                    "wr_id {:#x}: {}",
                    wc.wr_id,
                    verbs::status_name(wc.status)
                );
                let t = (wc.wr_id >> 32) as usize;
                check!(
                    t < threads && wc.wr_id & 0xffff_ffff == next[t],
                    "thread {t}: completion {:#x}, {} is due",
                    wc.wr_id,
                    next[t.min(threads - 1)]
                );
                next[t] += 1;
            }
            Ok(())
        })();
        stop.store(true, Ordering::Relaxed);
        let mut outcome = result;
        for handle in handles {
            let this = handle.join().unwrap_or_else(|_| Err("a thread panicked".into()));
            outcome = outcome.and(this);
        }
        outcome
    });
    outcome?;
    ep.barrier("posted").map_err(|e| e.to_string())?;
    for t in 0..threads {
        for (name, mr) in [("source", &source), ("target", &target)] {
            mr.memory
                .verify(t * area, area, run.seed ^ t as u64)
                .map_err(|m| format!("{name} of thread {t}: {m}"))?;
        }
    }
    run.note(
        ep,
        &format!(
            "{threads} threads, {count} requests each, the queue was full {} times",
            full.load(Ordering::Relaxed)
        ),
    );
    Ok(())
}

/// Hundreds of QPs at once, each with traffic both ways.
pub fn many_qps(run: &Run, ep: &Endpoint) -> Outcome {
    let count = if run.short { 64usize } else { 500 };
    let cq = ep.cq(count as u32 * 8).map_err(|e| format!("create_cq: {e}"))?;
    let mut qps: Vec<Arc<Qp>> = Vec::new();
    for i in 0..count {
        qps.push(ep.qp(&QpInit::rc(&cq, &cq, 4, 1, 0)).map_err(|e| format!("create_qp {i}: {e}"))?);
    }
    let size = 3000;
    let mr = ep.memory(count * size * 3, ALL_ACCESS).map_err(|e| e.to_string())?;
    let remote = ep.exchange_memory(&[&mr]).map_err(|e| e.to_string())?[0];
    let seed = |i: usize, leader: bool| Rng::of(&[run.seed, 70, i as u64, u64::from(leader)]).bits();
    for (i, qp) in qps.iter().enumerate() {
        qp.post_recv(i as u64, &[mr.sge((count + i) * size, size)]).map_err(|e| format!("post_recv: {e}"))?;
        mr.memory.fill(i * size, size, seed(i, ep.leads));
    }
    ep.connect(&qps, &run.tuning()).map_err(|e| format!("connecting {count} QPs: {e}"))?;
    for (i, qp) in qps.iter().enumerate() {
        let wr = |opcode, wr_id| SendWr {
            wr_id,
            sges: vec![mr.sge(i * size, size)],
            opcode,
            flags: verbs::IBV_SEND_SIGNALED,
            remote_addr: remote.addr + ((2 * count + i) * size) as u64,
            rkey: remote.rkey,
            ..SendWr::default()
        };
        qp.post_send(&[wr(verbs::IBV_WR_RDMA_WRITE, 1), wr(verbs::IBV_WR_SEND, 2)])
            .map_err(|e| format!("QP {i}: {e}"))?;
    }
    let mut sent = std::collections::HashMap::new();
    for n in 0..count * 3 {
        let Some(wc) = cq.poll_one(ep.wait).map_err(|e| e.to_string())? else {
            fail!("completion {n} of {} does not come", count * 3)
        };
        check!(wc.status == verbs::IBV_WC_SUCCESS, "QP {:#x}: {}", wc.qp_num, verbs::status_name(wc.status));
        if wc.opcode & verbs::IBV_WC_RECV == 0 {
            let last = sent.insert(wc.qp_num, wc.wr_id).unwrap_or(0);
            check!(wc.wr_id == last + 1, "QP {:#x}: wr_id {} after {last}", wc.qp_num, wc.wr_id);
        } else {
            let i = wc.wr_id as usize;
            check!(i < count && qps[i].number == wc.qp_num, "receive {i} belongs to QP {:#x}", wc.qp_num);
            for (name, at) in [("Send", count + i), ("Write before the Send", 2 * count + i)] {
                mr.memory
                    .verify(at * size, size, seed(i, !ep.leads))
                    .map_err(|m| format!("QP {i}: {name}: {m}"))?;
            }
        }
    }
    ep.barrier("all done").map_err(|e| e.to_string())?;
    run.note(ep, &format!("{count} QPs"));
    Ok(())
}
