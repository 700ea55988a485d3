// SPDX-License-Identifier: GPL-2.0
//! A program that polls memory must never see the flag before the data: flags written after
//! data (by Write, inline Write or atomic), and the last byte of a large Write. The regions
//! are registered without relaxed ordering. Both directions run at once.

#![forbid(unsafe_code)]

use crate::Run;
use selftests::endpoint::{Endpoint, Remote, ALL_ACCESS};
use selftests::ktap::Outcome;
use selftests::rng::{self, Rng};
use selftests::sys;
use selftests::verbs::{self, Mr, Qp, QpInit, SendWr, Wc};
use selftests::{check, fail};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Instant;

const SLOTS: usize = 8;
/// Bytes of a slot: room for the longest message and an unaligned start.
const SLOT: usize = (1 << 20) + 4096;

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Flag,
    LastByte,
}

/// What message `i` of a direction looks like.
struct Message {
    at: usize,
    len: usize,
    seed: u64,
    /// How many Writes carry the data.
    writes: usize,
    /// 0 Write, 1 inline Write, 2 fetch-and-add.
    flag: u64,
}

impl Message {
    fn of(run: &Run, mode: Mode, leader_sends: bool, i: u64) -> Message {
        let mut rng = Rng::of(&[run.seed, 50 + mode as u64, u64::from(leader_sends), i]);
        let p = run.payload as u64;
        let len = match rng.below(8) {
            0 => rng.range(1, 64),
            1..=3 => rng.range(1, 3 * p),
            4..=5 => *rng.pick(&[p - 1, p, p + 1, 2 * p + 1, 16 * p, 64 * p - 1]),
            6 => rng.range(1, 200_000),
            _ if run.short => rng.range(1, 100_000),
            _ => rng.range(1, 1 << 20),
        };
        Message {
            at: (i as usize % SLOTS) * SLOT + rng.below(4000) as usize,
            len: (len as usize).clamp(1, 1 << 20),
            seed: rng.bits(),
            writes: if mode == Mode::Flag { rng.range(1, 4) as usize } else { 1 },
            flag: rng.below(3),
        }
    }

    /// The last byte of message `i`: never 0, which the poller puts there beforehand.
    fn marker(i: u64) -> u8 {
        (i % 255) as u8 + 1
    }
}

/// Offsets in the control region: a flag word for each slot, then the credit word.
const CREDIT: usize = SLOTS * 8;
/// Where the credit is sent from, and where atomics return to.
const SCRATCH: usize = CREDIT + 64;

struct Ends {
    data_qp: Arc<Qp>,
    credit_qp: Arc<Qp>,
    source: Arc<Mr>,
    target: Arc<Mr>,
    control: Arc<Mr>,
    their_target: Remote,
    their_control: Remote,
}

fn progress_or_late(ep: &Endpoint, since: Instant, stop: &AtomicBool, what: &str) -> Outcome {
    if stop.load(Ordering::Relaxed) {
        fail!("{what}: the other thread failed");
    }
    if since.elapsed() > ep.wait {
        fail!("{what}: not within {} s", ep.wait.as_secs());
    }
    sys::yield_now();
    Ok(())
}

/// Sends messages `first..last`.
fn send(run: &Run, ep: &Endpoint, e: &Ends, mode: Mode, first: u64, last: u64, stop: &AtomicBool) -> Outcome {
    let qp = &e.data_qp;
    let mut done = first;
    let mut wc = [Wc::default()];
    let mut reap = |done: &mut u64| -> Outcome {
        while qp.send_cq.poll(&mut wc).map_err(|e| e.to_string())? == 1 {
            check!(
                wc[0].status == verbs::IBV_WC_SUCCESS,
                "message {}: {}",
                wc[0].wr_id,
                verbs::status_name(wc[0].status)
            );
            check!(wc[0].wr_id == *done, "message {} completed, {} is due", wc[0].wr_id, done);
            *done += 1;
        }
        Ok(())
    };
    for i in first..last {
        let m = Message::of(run, mode, ep.leads, i);
        let slot = i as usize % SLOTS;
        let since = Instant::now();
        // The slot is free at the receiver, and so is its source here.
        while i >= SLOTS as u64
            && (e.control.memory.word(CREDIT) + (SLOTS as u64) < i + 1 || done + (SLOTS as u64) < i + 1)
        {
            reap(&mut done)?;
            progress_or_late(ep, since, stop, &format!("credit for message {i}"))?;
        }
        e.source.memory.fill(m.at, m.len, m.seed);
        if mode == Mode::LastByte {
            e.source.memory.write(m.at + m.len - 1, &[Message::marker(i)]);
        }
        let mut list = Vec::new();
        let step = m.len / m.writes;
        for w in 0..m.writes {
            let at = m.at + w * step;
            let len = if w + 1 == m.writes { m.len - w * step } else { step };
            if len == 0 {
                continue;
            }
            list.push(SendWr {
                wr_id: i,
                sges: vec![e.source.sge(at, len)],
                opcode: verbs::IBV_WR_RDMA_WRITE,
                remote_addr: e.their_target.addr + at as u64,
                rkey: e.their_target.rkey,
                ..SendWr::default()
            });
        }
        if mode == Mode::Flag {
            let word = SCRATCH + 64 + slot * 8;
            e.control.memory.set_word(word, i + 1);
            let previous = if i >= SLOTS as u64 { i + 1 - SLOTS as u64 } else { 0 };
            let atomics = ep.device.atomic_cap != verbs::IBV_ATOMIC_NONE;
            let mut wr = SendWr {
                wr_id: i,
                sges: vec![e.control.sge(word, 8)],
                opcode: verbs::IBV_WR_RDMA_WRITE,
                remote_addr: e.their_control.addr + (slot * 8) as u64,
                rkey: e.their_control.rkey,
                ..SendWr::default()
            };
            match m.flag {
                1 if qp.cap.max_inline_data >= 8 => wr.flags = verbs::IBV_SEND_INLINE,
                2 if atomics => {
                    wr.opcode = verbs::IBV_WR_ATOMIC_FETCH_AND_ADD;
                    wr.compare_add = i + 1 - previous;
                    wr.sges = vec![e.control.sge(SCRATCH + 256 + slot * 8, 8)];
                }
                _ => {}
            }
            list.push(wr);
        }
        if let Some(wr) = list.last_mut() {
            wr.flags |= verbs::IBV_SEND_SIGNALED;
        }
        qp.post_send(&list).map_err(|e| format!("message {i}: {e}"))?;
        reap(&mut done)?;
    }
    let since = Instant::now();
    while done < last {
        reap(&mut done)?;
        progress_or_late(ep, since, stop, &format!("completion of message {done}"))?;
    }
    Ok(())
}

/// Polls for messages `first..last` and checks each at once.
fn receive(
    run: &Run,
    ep: &Endpoint,
    e: &Ends,
    mode: Mode,
    first: u64,
    last: u64,
    stop: &AtomicBool,
) -> Outcome {
    let qp = &e.credit_qp;
    let mut expected = vec![0; 1 << 20];
    let mut outstanding = 0;
    let mut wc = [Wc::default()];
    for i in first..last {
        let m = Message::of(run, mode, !ep.leads, i);
        let slot = i as usize % SLOTS;
        // Made before the wait, so that the look at the data follows the flag at once.
        let expected = &mut expected[..m.len];
        rng::fill(expected, m.seed);
        if mode == Mode::LastByte {
            expected[m.len - 1] = Message::marker(i);
        }
        let since = Instant::now();
        let mut spins = 0u32;
        loop {
            let seen = match mode {
                Mode::Flag => {
                    let word = e.control.memory.word(slot * 8);
                    let previous = if i >= SLOTS as u64 { i + 1 - SLOTS as u64 } else { 0 };
                    check!(
                        word == i + 1 || word == previous,
                        "flag of message {i} is {word}, neither {} nor {previous}",
                        i + 1
                    );
                    word == i + 1
                }
                Mode::LastByte => {
                    let byte = e.target.memory.byte(m.at + m.len - 1);
                    check!(byte == 0 || byte == Message::marker(i), "last byte of message {i} is {byte:#x}");
                    byte != 0
                }
            };
            if seen {
                break;
            }
            spins += 1;
            if spins % 16 == 0 {
                progress_or_late(ep, since, stop, &format!("message {i} ({} bytes)", m.len))?;
            }
        }
        rng::compare(&e.target.memory.copy(m.at, m.len), expected).map_err(|mm| {
            format!("message {i} ({} bytes at {:#x}): the flag is there, the data is not: {mm}", m.len, m.at)
        })?;
        if mode == Mode::LastByte {
            // The place that the next message of this slot will be seen at.
            let next = Message::of(run, mode, !ep.leads, i + SLOTS as u64);
            e.target.memory.set(next.at + next.len - 1, 1, 0);
        }
        // Credit: the number of messages that were checked.
        e.control.memory.set_word(SCRATCH, i + 1);
        let inline = if qp.cap.max_inline_data >= 8 { verbs::IBV_SEND_INLINE } else { 0 };
        let wr = SendWr {
            wr_id: i,
            sges: vec![e.control.sge(SCRATCH, 8)],
            opcode: verbs::IBV_WR_RDMA_WRITE,
            flags: verbs::IBV_SEND_SIGNALED | inline,
            remote_addr: e.their_control.addr + CREDIT as u64,
            rkey: e.their_control.rkey,
            ..SendWr::default()
        };
        qp.post_send(&[wr]).map_err(|e| format!("credit {i}: {e}"))?;
        outstanding += 1;
        let since = Instant::now();
        // Without inline data the source word is needed until the completion.
        while outstanding > if inline == 0 { 0 } else { 8 } {
            if qp.send_cq.poll(&mut wc).map_err(|e| e.to_string())? == 1 {
                check!(
                    wc[0].status == verbs::IBV_WC_SUCCESS,
                    "credit {}: {}",
                    wc[0].wr_id,
                    verbs::status_name(wc[0].status)
                );
                outstanding -= 1;
            } else {
                progress_or_late(ep, since, stop, &format!("completion of credit {i}"))?;
            }
        }
    }
    let since = Instant::now();
    while outstanding > 0 {
        if qp.send_cq.poll(&mut wc).map_err(|e| e.to_string())? == 1 {
            outstanding -= 1;
        } else {
            progress_or_late(ep, since, stop, "completion of the last credits")?;
        }
    }
    Ok(())
}

fn test(run: &Run, ep: &Endpoint, mode: Mode) -> Outcome {
    let make = |inline: u32| {
        let cq = ep.cq(64).map_err(|e| format!("create_cq: {e}"))?;
        let init = QpInit::rc(&cq, &cq, 64, 1, inline);
        Ok::<_, String>(match ep.qp(&init) {
            Ok(qp) => qp,
            Err(_) => ep.qp(&QpInit::rc(&cq, &cq, 64, 1, 0)).map_err(|e| format!("create_qp: {e}"))?,
        })
    };
    let (data_qp, credit_qp) = (make(16)?, make(16)?);
    let memory = |len| ep.memory(len, ALL_ACCESS).map_err(|e| format!("reg_mr of {len} bytes: {e}"));
    let (source, target, control) = (memory(SLOTS * SLOT)?, memory(SLOTS * SLOT)?, memory(4096)?);
    let theirs = ep.exchange_memory(&[&target, &control]).map_err(|e| e.to_string())?;
    let [their_target, their_control] = theirs[..] else { fail!("the other end sent no keys") };
    ep.connect(&[data_qp.clone(), credit_qp.clone()], &run.tuning())
        .map_err(|e| format!("connecting: {e}"))?;
    let e = Ends { data_qp, credit_qp, source, target, control, their_target, their_control };
    // The memory is zero as it came from the kernel: no marker anywhere yet.
    let end = Instant::now() + run.budget;
    let chunk = if run.short { 100 } else { 400 };
    let mut first = 0;
    loop {
        let more = first == 0 || Instant::now() < end;
        let words = ep.oob().exchange(&[u64::from(more)]).map_err(|e| e.to_string())?;
        if !(if ep.leads { more } else { words[0] == 1 }) {
            break;
        }
        let last = first + chunk;
        let stop = AtomicBool::new(false);
        let outcome: Outcome = std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                let result = send(run, ep, &e, mode, first, last, &stop);
                if result.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
                result
            });
            let result = receive(run, ep, &e, mode, first, last, &stop);
            if result.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            let sent = sender.join().unwrap_or_else(|_| Err("the sending thread panicked".into()));
            // The thread that only noticed the other one's failure has nothing to tell.
            let noticed = |r: &Outcome| matches!(r, Err(selftests::ktap::Stop::Fail(t)) if t.contains("the other thread failed"));
            if noticed(&result) {
                sent.and(result)
            } else {
                result.and(sent)
            }
        });
        outcome?;
        ep.barrier("chunk").map_err(|e| e.to_string())?;
        first = last;
    }
    run.note(ep, &format!("{first} messages in each direction"));
    Ok(())
}

/// A flag word written after the data.
pub fn flag_after_data(run: &Run, ep: &Endpoint) -> Outcome {
    test(run, ep, Mode::Flag)
}

/// The last byte of a Write.
pub fn last_byte(run: &Run, ep: &Endpoint) -> Outcome {
    test(run, ep, Mode::LastByte)
}
