// SPDX-License-Identifier: GPL-2.0
//! Traffic of which every byte and every completion is checked, while others do what they like.

#![forbid(unsafe_code)]

use selftests::endpoint::{Endpoint, Remote, Tuning, ALL_ACCESS};
use selftests::ktap::{Outcome, Stop};
use selftests::rng::{self, Rng};
use selftests::verbs::{self, Mr, Qp, QpInit, SendWr, Wc};
use selftests::{check, fail};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Bytes that the other end writes to.
const AREA: usize = 256 << 10;
/// Of these, what stays untouched on either side of what is written.
const GUARD: usize = 64 << 10;
/// Longest Write.
const LONGEST: usize = 60_000;
/// Length of a Send.
const SEND: usize = 256;
/// Receives that are posted.
const RECEIVES: usize = 32;
/// Offset of the word that fetch-and-adds count in.
const WORD: usize = GUARD;

/// What the traffic tells others.
#[derive(Default)]
pub struct State {
    /// To be ended.
    pub stop: AtomicBool,
    /// Rounds done: a Write, a READ of the same bytes, a fetch-and-add and a Send each.
    pub rounds: AtomicU64,
    /// Bytes moved.
    pub bytes: AtomicU64,
    /// What went wrong.
    pub fault: Mutex<Option<String>>,
}

impl State {
    /// What went wrong, if anything.
    pub fn fault(&self) -> Option<String> {
        self.fault.lock().unwrap_or_else(|p| p.into_inner()).clone()
    }
}

/// One end of the traffic.
pub struct Traffic {
    qp: Arc<Qp>,
    source: Arc<Mr>,
    back: Arc<Mr>,
    inbox: Arc<Mr>,
    outbox: Arc<Mr>,
    area: Arc<Mr>,
    remote: Remote,
    patience: Duration,
    seed: u64,
    /// The other end's.
    their_seed: u64,
}

impl Traffic {
    /// Connects one QP for it.
    pub fn new(ep: &Endpoint, seed: u64) -> Outcome<Self> {
        let text = |e: std::io::Error| Stop::Fail(e.to_string());
        let (send_cq, recv_cq) = (ep.cq(64).map_err(text)?, ep.cq(128).map_err(text)?);
        let qp = ep.qp(&QpInit::rc(&send_cq, &recv_cq, 32, 1, 0)).map_err(text)?;
        let area = ep.memory(AREA, ALL_ACCESS).map_err(text)?;
        let inbox = ep.memory(RECEIVES * SEND, ALL_ACCESS).map_err(text)?;
        for i in 0..RECEIVES {
            qp.post_recv(i as u64, &[inbox.sge(i * SEND, SEND)]).map_err(text)?;
        }
        ep.connect(&[qp.clone()], &Tuning { timeout: 18, ..Tuning::default() }).map_err(text)?;
        let remote = ep.exchange_memory(&[&area]).map_err(text)?[0];
        let their_seed = ep.oob().exchange(&[seed]).map_err(text)?.first().copied().unwrap_or(0);
        Ok(Traffic {
            outbox: ep.memory(SEND, ALL_ACCESS).map_err(text)?,
            their_seed,
            source: ep.memory(LONGEST, ALL_ACCESS).map_err(text)?,
            back: ep.memory(LONGEST + 8, ALL_ACCESS).map_err(text)?,
            qp,
            area,
            inbox,
            remote,
            patience: ep.wait,
            seed,
        })
    }

    /// Runs until `state` says stop, or something is wrong, which it then says.
    pub fn run(&self, state: &State) {
        if let Err(Stop::Fail(why) | Stop::Skip(why)) = self.rounds(state) {
            *state.fault.lock().unwrap_or_else(|p| p.into_inner()) = Some(why);
        }
    }

    fn rounds(&self, state: &State) -> Outcome {
        let mut rng = Rng::of(&[self.seed, 1]);
        let mut expected = vec![0; AREA - 2 * GUARD - 8];
        let mut received = 0;
        let mut round = 0u64;
        while !state.stop.load(Ordering::Relaxed) {
            let len = rng.range(1, *rng.clone().pick(&[64, 3000, LONGEST as u64])) as usize;
            let at = rng.below((expected.len() - len) as u64) as usize;
            let target = &mut expected[at..at + len];
            rng::fill(target, self.seed ^ round);
            self.source.memory.fill(0, len, self.seed ^ round);
            self.back.memory.set(0, len, 0x5a);
            let there = self.remote.addr + (WORD + 8 + at) as u64;
            let wr = |id: u64, opcode: u32| SendWr {
                wr_id: round << 2 | id,
                opcode,
                flags: verbs::IBV_SEND_SIGNALED,
                rkey: self.remote.rkey,
                ..SendWr::default()
            };
            self.outbox.memory.fill(0, SEND, !self.seed ^ round);
            let list = [
                SendWr {
                    sges: vec![self.source.sge(0, len)],
                    remote_addr: there,
                    ..wr(0, verbs::IBV_WR_RDMA_WRITE)
                },
                SendWr {
                    sges: vec![self.back.sge(0, len)],
                    remote_addr: there,
                    ..wr(1, verbs::IBV_WR_RDMA_READ)
                },
                SendWr {
                    sges: vec![self.back.sge(LONGEST / 8 * 8, 8)],
                    remote_addr: self.remote.addr + WORD as u64,
                    compare_add: 1,
                    ..wr(2, verbs::IBV_WR_ATOMIC_FETCH_AND_ADD)
                },
                SendWr { sges: vec![self.outbox.sge(0, SEND)], ..wr(3, verbs::IBV_WR_SEND) },
            ];
            self.qp.post_send(&list).map_err(|e| format!("round {round}: {e}"))?;
            for id in 0..4u64 {
                self.completion(round << 2 | id, &mut received)?;
            }
            self.back
                .memory
                .verify(0, len, self.seed ^ round)
                .map_err(|m| format!("round {round}: what was read back of {len} bytes: {m}"))?;
            let count = self.back.memory.word(LONGEST / 8 * 8);
            check!(count == round, "fetch-and-add number {round} found {count}");
            round += 1;
            state.rounds.store(round, Ordering::Relaxed);
            state.bytes.fetch_add(2 * len as u64 + SEND as u64, Ordering::Relaxed);
        }
        // All that was ever written, and nothing else.
        let mut at = 0;
        while at < expected.len() {
            let len = LONGEST.min(expected.len() - at);
            let read = SendWr {
                wr_id: 9,
                opcode: verbs::IBV_WR_RDMA_READ,
                flags: verbs::IBV_SEND_SIGNALED,
                sges: vec![self.back.sge(0, len)],
                remote_addr: self.remote.addr + (WORD + 8 + at) as u64,
                rkey: self.remote.rkey,
                ..SendWr::default()
            };
            self.qp.post_send(&[read]).map_err(|e| e.to_string())?;
            self.completion(9, &mut received)?;
            rng::compare(&self.back.memory.copy(0, len), &expected[at..at + len])
                .map_err(|m| format!("memory of the other end from {at} on: {m}"))?;
            at += len;
        }
        Ok(())
    }

    /// The next completion, which has to be that of `id`; takes receives meanwhile.
    fn completion(&self, id: u64, received: &mut u64) -> Outcome {
        let end = Instant::now() + self.patience;
        loop {
            let mut wcs = [Wc::default(); 1];
            self.receives(received)?;
            if self.qp.send_cq.poll(&mut wcs).map_err(|e| e.to_string())? == 1 {
                let wc = wcs[0];
                check!(
                    wc.status == verbs::IBV_WC_SUCCESS,
                    "request {id:#x} ended with {}",
                    verbs::status_name(wc.status)
                );
                check!(wc.wr_id == id, "request {:#x} ended where {id:#x} is due", wc.wr_id);
                return Ok(());
            }
            if Instant::now() > end {
                fail!("request {id:#x} does not end");
            }
            std::thread::yield_now();
        }
    }

    /// Takes what was received: each message once, in order, with the bytes of its sender.
    fn receives(&self, received: &mut u64) -> Outcome {
        let mut wcs = [Wc::default(); 8];
        let n = self.qp.recv_cq.poll(&mut wcs).map_err(|e| e.to_string())?;
        for wc in &wcs[..n] {
            check!(
                wc.status == verbs::IBV_WC_SUCCESS,
                "a receive ended with {}",
                verbs::status_name(wc.status)
            );
            check!(wc.byte_len as usize == SEND, "a message of {} bytes", wc.byte_len);
            let slot = (*received % RECEIVES as u64) as usize;
            check!(wc.wr_id == slot as u64, "receive {} ended where {slot} is due", wc.wr_id);
            self.inbox
                .memory
                .verify(slot * SEND, SEND, !self.their_seed ^ *received)
                .map_err(|m| format!("message {received}: {m}"))?;
            *received += 1;
            self.qp
                .post_recv(slot as u64, &[self.inbox.sge(slot * SEND, SEND)])
                .map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// Bytes around what the other end writes are as they were.
    pub fn guards(&self) -> Outcome {
        for at in [0, AREA - GUARD] {
            let bytes = self.area.memory.copy(at, GUARD);
            if let Some(i) = bytes.iter().position(|b| *b != 0) {
                fail!("byte {} of the own memory is {:#04x}: nobody has written there", at + i, bytes[i]);
            }
        }
        Ok(())
    }

    /// State of the QP.
    pub fn is_well(&self) -> Outcome {
        let state = self.qp.state().map_err(|e| e.to_string())?;
        check!(state == verbs::IBV_QPS_RTS, "the QP is in state {state}");
        Ok(())
    }
}
