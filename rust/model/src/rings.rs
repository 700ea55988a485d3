// SPDX-License-Identifier: GPL-2.0

//! A program and the kernel at the two sides of a ring.

#![forbid(unsafe_code)]

use crate::abi::metaroce_cqe;
use crate::completion::CompletionQueue;
use crate::engine::{explore, require, AtomicU32, Ordering, Program, Report};
use crate::recv::RecvQueue;
use crate::ring::Ring;
use crate::{errno, fails, holds, order, without_fences};
use std::sync::{Arc, Mutex};

fn leaked(value: u32) -> &'static AtomicU32 {
    // A few bytes for each execution, as the plugin's are the QP's.
    Box::leak(Box::new(AtomicU32::new(value)))
}

/// Receives from post to completion: what the kernel reads is what was posted, in order, and no
/// slot is written again before its completion has been polled. Two slots, three receives.
fn receives(release_early: bool) -> Report {
    const POSTS: u64 = 3;
    explore(2, move || {
        let ring = Ring::new(2, 2);
        let cq = Ring::new(4, 2);
        let polled = leaked(0);
        let mut queue = RecvQueue::new(ring.clone(), 0, false, polled);
        let mut completions = CompletionQueue::new(cq.clone());
        let taken = Arc::new(AtomicU32::new(0));
        let taken_at_end = taken.clone();
        let program = move || {
            let (mut posted, mut seen) = (0, 0);
            // A program that tries a few times.
            for _ in 0..4 {
                if posted < POSTS {
                    match queue.push(100 + posted, &[]) {
                        Ok(()) => {
                            queue.publish();
                            posted += 1;
                            require(posted - seen <= 2, "more receives than slots");
                        }
                        Err(e) => require(e == errno::ENOMEM, "another error"),
                    }
                }
                if let Some(cqe) = completions.next() {
                    require(cqe.wr_id == 100 + seen, "a wrong completion");
                    completions.release();
                    polled.fetch_add(1, Ordering::Release);
                    seen += 1;
                }
            }
        };
        let kernel = move || {
            let (mut index, mut producer) = (0u32, 0);
            for _ in 0..3 {
                if order::filled(&ring, index) == 0 {
                    continue;
                }
                if release_early {
                    order::release(&ring, index.wrapping_add(1));
                    // As a completion that is there before the slot has been read.
                    order::push(&cq, &mut producer, &[100 + u64::from(index), 1]);
                }
                let mut words = [0; 2];
                order::Words::read(&ring, index, 0, &mut words);
                require(words == [100 + u64::from(index), 0], "not what was posted");
                index += 1;
                if !release_early {
                    order::release(&ring, index);
                    order::push(&cq, &mut producer, &words);
                }
            }
            taken.store(index, Ordering::Relaxed);
        };
        Program {
            threads: vec![Box::new(program), Box::new(kernel)],
            end: Box::new(move || require(taken_at_end.load(Ordering::Relaxed) <= 3, "too many")),
        }
    })
}

#[test]
fn a_receive_is_read_as_posted_and_its_slot_used_again_afterwards() {
    holds("receives", &receives(false));
    fails("a slot given back before it is read", &receives(true));
}

/// A full CQ: nothing that is not polled is written over.
#[test]
fn a_completion_is_not_written_over() {
    let report = explore(3, || {
        let cq = Ring::new(1, 2);
        let mut completions = CompletionQueue::new(cq.clone());
        let pushed = Arc::new(Mutex::new(0));
        let of_kernel = pushed.clone();
        Program {
            threads: vec![
                Box::new(move || {
                    let mut expected = 0;
                    for _ in 0..3 {
                        if let Some(metaroce_cqe { wr_id, qpn }) = completions.next() {
                            require(wr_id == expected, "out of order");
                            require(
                                u64::from(qpn) == expected + 7,
                                "half of one and half of another",
                            );
                            expected += 1;
                            completions.release();
                        }
                    }
                }),
                Box::new(move || {
                    let mut producer = 0;
                    for _ in 0..3 {
                        let n = u64::from(producer);
                        order::push(&cq, &mut producer, &[n, n + 7]);
                    }
                    *of_kernel.lock().expect("one at a time") = producer;
                }),
            ],
            end: Box::new(move || {
                require(
                    *pushed.lock().expect("one at a time") >= 1,
                    "the first one has room",
                );
            }),
        }
    });
    holds("a CQ of one slot", &report);
}

/// A program that polls, arms, polls once more and sleeps is woken for what it has not polled.
macro_rules! arm_and_poll {
    ($kernel:path, $look_again:expr) => {
        explore(4, || {
            use $kernel as side;
            let cq = Ring::new(2, 2);
            let mut completions = CompletionQueue::new(cq.clone());
            let of_program = cq.clone();
            let told = Arc::new(Mutex::new(false));
            let polled = Arc::new(Mutex::new(0));
            let (tells, counts) = (told.clone(), polled.clone());
            Program {
                threads: vec![
                    Box::new(move || {
                        let mut seen = 0;
                        seen += u32::from(completions.next().is_some());
                        of_program.raise(2);
                        if $look_again {
                            while completions.next().is_some() {
                                seen += 1;
                            }
                        }
                        *counts.lock().expect("one at a time") = seen;
                    }),
                    Box::new(move || {
                        let mut producer = 0;
                        for n in 0..2 {
                            require(side::push(&cq, &mut producer, &[n, 0]), "full");
                            if side::take_arm(&cq, false) {
                                *tells.lock().expect("one at a time") = true;
                            }
                        }
                    }),
                ],
                end: Box::new(move || {
                    let seen = *polled.lock().expect("one at a time");
                    let told = *told.lock().expect("one at a time");
                    require(told || seen == 2, "it sleeps, and there is a completion");
                }),
            }
        })
    };
}

#[test]
fn whoever_arms_and_looks_again_is_woken() {
    holds("arm and poll", &arm_and_poll!(crate::order, true));
    fails(
        "arm without looking again",
        &arm_and_poll!(crate::order, false),
    );
    fails(
        "a kernel without the fence",
        &arm_and_poll!(without_fences::order, true),
    );
}

/// A queue pair goes to ERR while receives are posted: each is flushed, by the kernel's look
/// or after a doorbell.
macro_rules! flush_and_post {
    ($kernel:path) => {
        explore(4, || {
            use $kernel as side;
            let ring = Ring::new(4, 2);
            let mut queue = RecvQueue::new(ring.clone(), 0, false, leaked(0));
            let of_kernel = ring.clone();
            let state = Arc::new(Mutex::new((false, 0)));
            let (rings, flushes) = (state.clone(), state.clone());
            Program {
                threads: vec![
                    Box::new(move || {
                        for id in 0..2 {
                            require(queue.push(id, &[]).is_ok(), "no room");
                            queue.publish();
                            if queue.wants_doorbell() {
                                rings.lock().expect("one at a time").0 = true;
                            }
                        }
                    }),
                    Box::new(move || {
                        side::want_doorbell(&of_kernel, true);
                        let flushed = side::filled(&of_kernel, 0);
                        flushes.lock().expect("one at a time").1 = flushed;
                    }),
                ],
                end: Box::new(move || {
                    let (doorbell, flushed) = *state.lock().expect("one at a time");
                    require(doorbell || flushed == 2, "a receive is never flushed");
                }),
            }
        })
    };
}

#[test]
fn receives_posted_in_err_are_flushed() {
    holds("flush and post", &flush_and_post!(crate::order));
    fails(
        "a kernel without the fence",
        &flush_and_post!(without_fences::order),
    );
}

/// Receives of an SRQ that go without a completion free their slots as well, not before they
/// have been read. `lost_first`: the kernel says so before it is done with the slot.
fn lost_receives(lost_first: bool, read_late: bool) -> Report {
    explore(3, move || {
        let ring = Ring::new(1, 2);
        let mut queue = RecvQueue::new(ring.clone(), 0, true, leaked(0));
        Program {
            threads: vec![
                Box::new(move || {
                    let mut posted = 0;
                    for _ in 0..4 {
                        if queue.push(100 + posted, &[]).is_ok() {
                            queue.publish();
                            posted += 1;
                        }
                    }
                }),
                Box::new(move || {
                    let mut index = 0;
                    for _ in 0..2 {
                        if order::filled(&ring, index) == 0 {
                            continue;
                        }
                        let mut words = [0; 2];
                        let mut read = || order::Words::read(&ring, index, 0, &mut words);
                        if !read_late {
                            read();
                        }
                        if lost_first {
                            order::publish_lost(&ring, index + 1);
                            order::release(&ring, index + 1);
                        } else {
                            order::release(&ring, index + 1);
                            order::publish_lost(&ring, index + 1);
                        }
                        if read_late {
                            read();
                        }
                        require(words == [100 + u64::from(index), 0], "not what was posted");
                        index += 1;
                    }
                }),
            ],
            end: Box::new(|| {}),
        }
    })
}

#[test]
fn a_receive_without_completion_frees_its_slot() {
    holds("lost, then taken", &lost_receives(true, false));
    holds("taken, then lost", &lost_receives(false, false));
    fails("read afterwards", &lost_receives(false, true));
}
