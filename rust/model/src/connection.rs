// SPDX-License-Identifier: GPL-2.0

//! The rules of drive.rs, bh.rs and qp.rs by which softirqs share a connection, a work item and a
//! queue pair's memory; each is written down here as it stands there, without what it moves.

#![forbid(unsafe_code)]

use crate::engine::{explore, require, AtomicU32, Guard, Mutex, Ordering, Program, Report};
use crate::{fails, holds};
use std::sync::Arc;

/// What the connection's lock guards.
struct State {
    /// Packets that the core has for sending.
    input: u32,
    sent: u32,
    /// The right to send: `State::batch`.
    batch: bool,
    more: bool,
    /// The work item is queued.
    queued: bool,
}

struct Conn {
    state: Mutex<State>,
    /// How many send just now.
    sending: AtomicU32,
}

impl Conn {
    fn input(&self) {
        self.state.lock().input += 1;
    }

    /// `Conn::run`, with one round before it gives way. `forget`: does not say that there is more.
    fn run(&self, forget: bool) {
        let mut state = self.state.lock();
        if !state.batch {
            state.more |= !forget;
            return;
        }
        state.batch = false;
        for _ in 0..2 {
            state.more = false;
            let packets = std::mem::take(&mut state.input);
            if packets == 0 && !state.more {
                state.batch = true;
                return;
            }
            state = self.send(state, packets);
            // Under the lock again: `more` says that others came, and the core is asked anew.
        }
        state.batch = true;
        state.queued = true;
    }

    fn send<'a>(&'a self, state: Guard<'a, State>, packets: u32) -> Guard<'a, State> {
        drop(state);
        require(
            self.sending.fetch_add(1, Ordering::Relaxed) == 0,
            "two send at once",
        );
        self.sending.fetch_sub(1, Ordering::Relaxed);
        let mut state = self.state.lock();
        state.sent += packets;
        state
    }

    /// The work item, as often as it is queued.
    fn work(&self) {
        loop {
            if !std::mem::take(&mut self.state.lock().queued) {
                return;
            }
            self.run(false);
        }
    }
}

fn senders(break_it: fn(&Conn)) -> Report {
    explore(3, move || {
        let conn = Arc::new(Conn {
            state: Mutex::new(State {
                input: 0,
                sent: 0,
                batch: true,
                more: false,
                queued: false,
            }),
            sending: AtomicU32::new(0),
        });
        let sender = |conn: &Arc<Conn>| {
            let conn = conn.clone();
            Box::new(move || {
                conn.input();
                break_it(&conn);
                conn.work();
            })
        };
        let threads: Vec<crate::engine::Body> = vec![sender(&conn), sender(&conn), sender(&conn)];
        Program {
            threads,
            end: Box::new(move || {
                conn.work();
                let state = conn.state.lock();
                require(state.batch, "the right to send is lost");
                require(
                    (state.input, state.sent) == (0, 3),
                    "input that nobody sends",
                );
            }),
        }
    })
}

#[test]
fn one_sends_and_nothing_is_left() {
    holds("three senders", &senders(|conn| conn.run(false)));
    // Without taking the right.
    fails(
        "a sender that does not ask",
        &senders(|conn| {
            let mut state = conn.state.lock();
            let packets = std::mem::take(&mut state.input);
            drop(conn.send(state, packets));
        }),
    );
}

/// A work item: `bh::queue` passes over one that is pending, since its run begins with clearing
/// that and a lock that the caller has held.
struct Item {
    pending: AtomicU32,
    /// What the run has to see.
    input: Mutex<u32>,
}

impl Item {
    fn queue(&self) -> bool {
        self.pending.load(Ordering::Relaxed) == 0 && self.pending.swap(1, Ordering::AcqRel) == 0
    }

    fn run(&self, clear_late: bool) -> u32 {
        let clear = || {
            self.pending.swap(0, Ordering::AcqRel);
        };
        if !clear_late {
            clear();
        }
        let done = std::mem::take(&mut *self.input.lock());
        if clear_late {
            clear();
        }
        done
    }
}

fn work_items(clear_late: bool) -> Report {
    explore(2, move || {
        let item = Arc::new(Item {
            pending: AtomicU32::new(0),
            input: Mutex::new(0),
        });
        let done = Arc::new(AtomicU32::new(0));
        let threads = (0..3).map(|_| {
            let (item, done) = (item.clone(), done.clone());
            Box::new(move || {
                *item.input.lock() += 1;
                if item.queue() {
                    let n = item.run(clear_late);
                    done.fetch_add(n, Ordering::Relaxed);
                }
            }) as crate::engine::Body
        });
        Program {
            threads: threads.collect(),
            end: Box::new(move || require(done.load(Ordering::Relaxed) == 3, "not worked on")),
        }
    })
}

#[test]
fn a_pending_item_sees_what_came_before() {
    holds("work item", &work_items(false));
    fails("pending until the end", &work_items(true));
}

/// `QpInner::copies`.
const COUNT: u32 = 0xffff;
const QUEUEING: u32 = 1 << 16;
const FLUSH: u32 = 1 << 31;

struct Qp {
    copies: AtomicU32,
    /// Copies under way, to be told from the count.
    running: AtomicU32,
    flushed: AtomicU32,
    /// The core takes packets for it: neither in ERR nor taken out.
    takes: Mutex<bool>,
    queued: AtomicU32,
}

impl Qp {
    fn must_wait(&self) -> bool {
        self.copies.load(Ordering::Acquire) & COUNT != 0
            && self.copies.fetch_or(FLUSH, Ordering::AcqRel) & COUNT != 0
    }

    fn flush(&self) {
        *self.takes.lock() = false;
        if !self.must_wait() {
            require(
                self.running.load(Ordering::Acquire) == 0,
                "flushed under a copy",
            );
            self.flushed.store(1, Ordering::Relaxed);
        }
    }

    /// A packet: its QP found, its copy planned under the lock, made, and dropped.
    fn packet(&self, late_plan: bool) {
        {
            let takes = self.takes.lock();
            if !*takes {
                return;
            }
            if !late_plan {
                self.copies.fetch_add(1, Ordering::AcqRel);
            }
        }
        if late_plan {
            self.copies.fetch_add(1, Ordering::AcqRel);
        }
        self.running.fetch_add(1, Ordering::Relaxed);
        self.running.fetch_sub(1, Ordering::Release);
        let before = self
            .copies
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                Some(if now & (FLUSH | COUNT) == FLUSH | 1 {
                    now - 1 - FLUSH + QUEUEING
                } else {
                    now - 1
                })
            });
        if before.is_ok_and(|was| was & (FLUSH | COUNT) == FLUSH | 1) {
            self.queued.store(1, Ordering::Release);
            self.copies.fetch_sub(QUEUEING, Ordering::AcqRel);
        }
    }
}

fn copies(late_plan: bool) -> Report {
    explore(3, move || {
        let qp = Arc::new(Qp {
            copies: AtomicU32::new(0),
            running: AtomicU32::new(0),
            flushed: AtomicU32::new(0),
            takes: Mutex::new(true),
            queued: AtomicU32::new(0),
        });
        let (flusher, destroyer) = (qp.clone(), qp.clone());
        let packet = qp.clone();
        Program {
            threads: vec![
                Box::new(move || packet.packet(late_plan)),
                Box::new(move || flusher.flush()),
                Box::new(move || {
                    *destroyer.takes.lock() = false;
                    // `wait_for_copies`, looked at once: it goes on only when there are none.
                    if destroyer.copies.load(Ordering::Acquire) & !FLUSH == 0 {
                        require(
                            destroyer.running.load(Ordering::Acquire) == 0,
                            "memory goes under a copy",
                        );
                    }
                }),
            ],
            end: Box::new(move || {
                let done = qp.flushed.load(Ordering::Relaxed) == 1
                    || qp.queued.load(Ordering::Relaxed) == 1;
                require(done, "a flush was put off for good");
                require(
                    qp.copies.load(Ordering::Relaxed) & !FLUSH == 0,
                    "a copy is counted for ever",
                );
            }),
        }
    })
}

#[test]
fn memory_stays_while_a_copy_runs_and_flushes_come_after_it() {
    holds("copies", &copies(false));
    fails("a copy that is counted too late", &copies(true));
}
