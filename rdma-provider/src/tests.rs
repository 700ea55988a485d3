// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#![forbid(unsafe_code)]

//! Queues and rings without a device: the kernel is played over the same memory.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::abi::*;
use crate::errno::{EINVAL, ENOMEM, EPROTO};
use crate::queue::{may_receive, may_send, CompletionQueue, Limits, RecvQueue, Request, SendQueue};
use crate::ring::{Lock, Ring};

const LIMITS: Limits = Limits { max_sge: 4, max_inline: 64, max_message: 1 << 31 };
const STRIDE: usize = SEND_WQE + 64;

/// The kernel's side of an SQ or RQ.
struct Taker {
    ring: Ring,
    consumer: u32,
}

impl Taker {
    fn new(ring: &Ring) -> Taker {
        Taker { consumer: ring.consumer().load(Ordering::Relaxed), ring: ring.other_side() }
    }

    fn waiting(&self) -> u32 {
        self.ring.producer().load(Ordering::Acquire).wrapping_sub(self.consumer)
    }

    fn retire(&mut self) {
        self.consumer = self.consumer.wrapping_add(1);
        self.ring.consumer().store(self.consumer, Ordering::Release);
    }

    fn take_send(&mut self) -> Option<(metaroce_send_wqe, Vec<u8>)> {
        if self.waiting() == 0 {
            return None;
        }
        assert!(self.waiting() <= self.ring.entries());
        let slot = self.ring.slot(self.consumer);
        let wqe: metaroce_send_wqe = slot.get().unwrap();
        let payload = slot.bytes(SEND_WQE, wqe.num_sge as usize * SGE + wqe.inline_len as usize);
        Some((wqe, payload))
    }

    fn take_recv(&mut self) -> Option<(metaroce_recv_wqe, Vec<u8>)> {
        if self.waiting() == 0 {
            return None;
        }
        assert!(self.waiting() <= self.ring.entries());
        let slot = self.ring.slot(self.consumer);
        let wqe: metaroce_recv_wqe = slot.get().unwrap();
        Some((wqe, slot.bytes(RECV_WQE, wqe.num_sge as usize * SGE)))
    }
}

/// The kernel's side of a CQ.
struct Giver {
    ring: Ring,
    producer: u32,
}

impl Giver {
    fn new(ring: &Ring) -> Giver {
        Giver { producer: ring.producer().load(Ordering::Relaxed), ring: ring.other_side() }
    }

    fn give(&mut self, cqe: metaroce_cqe) -> bool {
        if self.producer.wrapping_sub(self.ring.consumer().load(Ordering::Acquire)) >= self.ring.entries() {
            return false;
        }
        self.ring.slot(self.producer).put(0, &[cqe]).unwrap();
        self.producer = self.producer.wrapping_add(1);
        self.ring.producer().store(self.producer, Ordering::Release);
        true
    }
}

/// A ring whose indices both stand at `start`.
fn ring_at(kind: u32, entries: u32, stride: usize, start: u32) -> Ring {
    let ring = Ring::anonymous(kind, entries, stride);
    ring.producer().store(start, Ordering::Relaxed);
    ring.consumer().store(start, Ordering::Relaxed);
    ring
}

/// What a poller stores into, for a queue of a test.
pub(crate) fn polled() -> &'static AtomicU32 {
    Box::leak(Box::new(AtomicU32::new(0)))
}

fn send_queue(entries: u32, start: u32) -> (SendQueue, Taker) {
    let ring = ring_at(METAROCE_RING_SQ, entries, STRIDE, start);
    let taker = Taker::new(&ring);
    (SendQueue::new(ring, LIMITS, false, polled()), taker)
}

fn send(wr_id: u64) -> Request {
    Request { wr_id, opcode: METAROCE_WR_SEND, ..Request::default() }
}

fn sge(addr: u64, length: u32, lkey: u32) -> metaroce_sge {
    metaroce_sge { addr, length, lkey }
}

fn sge_bytes(sges: &[metaroce_sge]) -> Vec<u8> {
    sges.iter()
        .flat_map(|sge| {
            let mut bytes = sge.addr.to_ne_bytes().to_vec();
            bytes.extend(sge.length.to_ne_bytes());
            bytes.extend(sge.lkey.to_ne_bytes());
            bytes
        })
        .collect()
}

fn cqe(wr_id: u64, qpn: u32) -> metaroce_cqe {
    metaroce_cqe { wr_id, qpn, ..Default::default() }
}

fn drain(queue: &mut CompletionQueue) -> Vec<u64> {
    let mut ids = Vec::new();
    while let Some(cqe) = queue.next() {
        ids.push(cqe.wr_id);
    }
    queue.release();
    ids
}

#[test]
fn headers_that_make_no_sense_are_refused() {
    let good = metaroce_ring {
        magic: METAROCE_RING_MAGIC,
        kind: METAROCE_RING_CQ,
        entries: 8,
        stride: 64,
        slots_offset: 256,
        ..Default::default()
    };
    let adopt = |header| Ring::anonymous_with(header, METAROCE_RING_CQ, 64).map(|_| ());
    assert_eq!(adopt(good), Ok(()));
    for bad in [
        metaroce_ring { magic: 0, ..good },
        metaroce_ring { kind: METAROCE_RING_SQ, ..good },
        metaroce_ring { entries: 0, ..good },
        metaroce_ring { entries: 6, ..good },
        metaroce_ring { entries: 1 << 31, ..good },
        metaroce_ring { stride: 56, ..good },
        metaroce_ring { stride: 68, ..good },
        metaroce_ring { stride: u32::MAX - 7, ..good },
        metaroce_ring { slots_offset: 0, ..good },
        metaroce_ring { slots_offset: 260, ..good },
        metaroce_ring { slots_offset: u32::MAX - 7, ..good },
        // One slot more than the mapping of 1 MiB holds.
        metaroce_ring { entries: 1 << 14, ..good },
    ] {
        assert_eq!(adopt(bad), Err(EPROTO), "{bad:?}");
    }
}

#[test]
fn send_queue_fills_and_empties_across_the_wrap_of_the_index() {
    for start in [0, 5, u32::MAX - 3, u32::MAX] {
        let (mut queue, mut kernel) = send_queue(8, start);
        let mut next = 0;
        let mut expected = 0;
        for round in 0..5 {
            for _ in 0..8 {
                let wr = send(next);
                queue.push(&wr, |queue| queue.set_sges(&[sge(next, 1, 2)])).unwrap();
                next += 1;
            }
            assert_eq!(queue.push(&send(99), |_| Ok(())), Err(ENOMEM), "round {round}");
            assert_eq!(kernel.waiting(), 0, "nothing is visible before it is published");
            assert!(queue.publish());
            assert!(!queue.publish());
            assert_eq!(queue.push(&send(99), |_| Ok(())), Err(ENOMEM));
            while let Some((wqe, payload)) = kernel.take_send() {
                assert_eq!((wqe.wr_id, wqe.num_sge), (expected, 1));
                assert_eq!(payload, sge_bytes(&[sge(expected, 1, 2)]));
                expected += 1;
                kernel.retire();
            }
        }
        assert_eq!(expected, 40);
    }
}

#[test]
fn send_elements_hold_what_was_asked_for() {
    let (mut queue, mut kernel) = send_queue(4, 0);
    let request = Request {
        wr_id: 0x1122_3344_5566_7788,
        opcode: METAROCE_WR_ATOMIC_CMP_AND_SWP,
        flags: METAROCE_SEND_SIGNALED | METAROCE_SEND_FENCE | METAROCE_SEND_SOLICITED,
        remote_addr: 0xaabb_ccdd_eeff_0011,
        rkey: 0x0102_0304,
        imm_data: 0x0506_0708,
        compare_add: 0x1111_2222_3333_4444,
        swap: 0x5555_6666_7777_8888,
    };
    let list = [sge(0x1000, 8, 7)];
    queue.push(&request, |queue| queue.set_sges(&list)).unwrap();
    queue.publish();
    let (wqe, payload) = kernel.take_send().unwrap();
    assert_eq!(wqe.wr_id, request.wr_id);
    assert_eq!(wqe.opcode, request.opcode);
    assert_eq!(wqe.flags, request.flags);
    assert_eq!(wqe.remote_addr, request.remote_addr);
    assert_eq!(wqe.rkey, request.rkey);
    assert_eq!(wqe.imm_data, request.imm_data);
    assert_eq!(wqe.compare_add, request.compare_add);
    assert_eq!(wqe.swap, request.swap);
    assert_eq!((wqe.num_sge, wqe.inline_len, wqe.reserved), (1, 0, [0; 2]));
    assert_eq!(payload, sge_bytes(&list));
}

#[test]
fn signal_all_marks_every_request() {
    let ring = Ring::anonymous(METAROCE_RING_SQ, 4, STRIDE);
    let mut kernel = Taker::new(&ring);
    let mut queue = SendQueue::new(ring, LIMITS, true, polled());
    queue.push(&send(1), |_| Ok(())).unwrap();
    queue.publish();
    assert_eq!(kernel.take_send().unwrap().0.flags, METAROCE_SEND_SIGNALED);
}

#[test]
fn requests_beyond_the_limits_are_refused() {
    let (mut queue, kernel) = send_queue(4, 0);
    let five = [sge(0, 1, 0); 5];
    let half = 1u32 << 30;
    let write = Request { opcode: METAROCE_WR_RDMA_WRITE, ..Request::default() };
    assert_eq!(queue.push(&write, |queue| queue.set_sges(&five)), Err(EINVAL));
    assert_eq!(
        queue.push(&write, |queue| queue.set_sges(&[sge(0, half, 0), sge(0, half, 0), sge(0, 1, 0)])),
        Err(EINVAL)
    );
    // Four times the largest length does not wrap to a small sum.
    assert_eq!(queue.push(&write, |queue| queue.set_sges(&[sge(0, u32::MAX, 0); 4])), Err(EINVAL));
    for opcode in [METAROCE_WR_BIND_MW, 10, 14, u32::MAX] {
        assert_eq!(queue.push(&Request { opcode, ..Request::default() }, |_| Ok(())), Err(EINVAL));
    }
    assert_eq!(queue.push(&Request { flags: METAROCE_SEND_INLINE, ..write }, |_| Ok(())), Err(EINVAL));
    assert_eq!(queue.push(&Request { flags: 1 << 4, ..write }, |_| Ok(())), Err(EINVAL));
    let add = Request { opcode: METAROCE_WR_ATOMIC_FETCH_AND_ADD, ..Request::default() };
    assert_eq!(queue.push(&add, |queue| queue.set_sges(&[sge(0, 7, 0)])), Err(EINVAL));
    assert_eq!(queue.push(&add, |_| Ok(())), Err(EINVAL));
    assert!(!queue.publish());
    assert_eq!(kernel.waiting(), 0);
    queue.push(&write, |queue| queue.set_sges(&[sge(0, half, 0), sge(0, half, 0)])).unwrap();
    queue.push(&add, |queue| queue.set_sges(&[sge(0, 8, 0)])).unwrap();
    assert!(queue.publish());
    assert_eq!(kernel.waiting(), 2);
}

#[test]
fn a_failed_request_leaves_the_ones_before_it() {
    let (mut queue, mut kernel) = send_queue(8, 0);
    queue.push(&send(1), |queue| queue.set_sges(&[sge(1, 1, 1)])).unwrap();
    queue.push(&send(2), |queue| queue.set_sges(&[sge(0, 1, 0); 5])).unwrap_err();
    queue.push(&send(3), |_| Ok(())).unwrap();
    queue.publish();
    assert_eq!(kernel.take_send().unwrap().0.wr_id, 1);
    kernel.retire();
    assert_eq!(kernel.take_send().unwrap().0.wr_id, 3);
    kernel.retire();
    assert!(kernel.take_send().is_none());
}

#[test]
fn batches_by_steps() {
    let (mut queue, mut kernel) = send_queue(4, u32::MAX);
    // Two requests, the first without payload.
    queue.start(Ok(()));
    queue.step(|queue| queue.open(&send(1)));
    queue.step(|queue| queue.open(&send(2)));
    queue.step(|queue| queue.set_sges(&[sge(9, 9, 9)]));
    assert_eq!(kernel.waiting(), 0);
    assert_eq!(queue.complete(), Ok(true));
    let (first, none) = kernel.take_send().unwrap();
    assert_eq!((first.wr_id, first.num_sge, none.len()), (1, 0, 0));
    kernel.retire();
    let (second, list) = kernel.take_send().unwrap();
    assert_eq!((second.wr_id, second.num_sge), (2, 1));
    assert_eq!(list, sge_bytes(&[sge(9, 9, 9)]));
    kernel.retire();

    // Nothing posted: no doorbell.
    queue.start(Ok(()));
    assert_eq!(queue.complete(), Ok(false));

    // The first error is reported, and takes the whole batch with it.
    queue.start(Ok(()));
    queue.step(|queue| queue.open(&send(3)));
    queue.step(|queue| queue.set_sges(&[sge(0, 1, 0); 5]));
    queue.step(|queue| queue.open(&send(4)));
    for id in 5..20 {
        queue.step(|queue| queue.open(&send(id)));
    }
    assert_eq!(queue.complete(), Err(EINVAL));
    assert_eq!(kernel.waiting(), 0);

    // A full queue.
    queue.start(Ok(()));
    for id in 0..5 {
        queue.step(|queue| queue.open(&send(id)));
    }
    assert_eq!(queue.complete(), Err(ENOMEM));

    // Payload without a request, and an atomic without payload.
    queue.start(Ok(()));
    queue.step(|queue| queue.set_sges(&[sge(0, 1, 0)]));
    assert_eq!(queue.complete(), Err(EINVAL));
    queue.start(Ok(()));
    queue.step(|queue| {
        queue.open(&Request { opcode: METAROCE_WR_ATOMIC_FETCH_AND_ADD, ..Request::default() })
    });
    assert_eq!(queue.complete(), Err(EINVAL));

    // A state that forbids posting.
    queue.start(may_send(0));
    queue.step(|queue| queue.open(&send(5)));
    assert_eq!(queue.complete(), Err(EINVAL));

    // Taken back.
    queue.start(Ok(()));
    queue.step(|queue| queue.open(&send(6)));
    queue.discard();
    assert_eq!(kernel.waiting(), 0);

    // None of this left anything behind.
    queue.start(Ok(()));
    queue.step(|queue| queue.open(&send(7)));
    assert_eq!(queue.complete(), Ok(true));
    assert_eq!(kernel.take_send().unwrap().0.wr_id, 7);
}

#[test]
fn a_signaled_slot_is_free_when_its_completion_is_polled() {
    let ring = ring_at(METAROCE_RING_SQ, 4, STRIDE, 7);
    let mut kernel = Taker::new(&ring);
    let polled = polled();
    let mut queue = SendQueue::new(ring, LIMITS, false, polled);
    let signaled = |id| Request { flags: METAROCE_SEND_SIGNALED, ..send(id) };
    queue.push(&send(0), |_| Ok(())).unwrap();
    queue.push(&signaled(1), |_| Ok(())).unwrap();
    queue.push(&send(2), |_| Ok(())).unwrap();
    queue.push(&signaled(3), |_| Ok(())).unwrap();
    queue.publish();
    for _ in 0..4 {
        kernel.retire();
    }
    // The first one has no completion, the second has one that nobody has polled.
    queue.push(&signaled(4), |_| Ok(())).unwrap();
    assert_eq!(queue.push(&send(5), |_| Ok(())), Err(ENOMEM));
    polled.store(9, Ordering::Release);
    queue.push(&signaled(5), |_| Ok(())).unwrap();
    queue.push(&signaled(6), |_| Ok(())).unwrap();
    assert_eq!(queue.push(&send(7), |_| Ok(())), Err(ENOMEM));
    // Nobody can have polled what the kernel has not done.
    queue.publish();
    polled.store(14, Ordering::Release);
    assert_eq!(queue.push(&send(7), |_| Ok(())), Err(ENOMEM));
}

#[test]
fn reset_goes_on_where_the_kernel_stands() {
    let (mut queue, mut kernel) = send_queue(4, 10);
    for id in 0..4 {
        queue.push(&send(id), |_| Ok(())).unwrap();
    }
    queue.publish();
    kernel.retire();
    // The kernel drops the other three.
    kernel.consumer = 14;
    kernel.ring.consumer().store(14, Ordering::Release);
    queue.reset();
    assert_eq!(kernel.waiting(), 0);
    for id in 10..14 {
        queue.push(&send(id), |_| Ok(())).unwrap();
    }
    queue.publish();
    assert_eq!(kernel.take_send().unwrap().0.wr_id, 10);

    let ring = ring_at(METAROCE_RING_RQ, 4, RECV_WQE + 4 * SGE, 0);
    let mut kernel = Taker::new(&ring);
    let mut queue = RecvQueue::new(ring, 4, false, polled());
    queue.push(1, &[]).unwrap();
    queue.publish();
    kernel.retire();
    queue.reset();
    assert_eq!(kernel.waiting(), 0);
    queue.push(2, &[]).unwrap();
    queue.publish();
    assert_eq!(kernel.take_recv().unwrap().0.wr_id, 2);
}

#[test]
fn receive_queue() {
    for start in [0, u32::MAX - 1] {
        let ring = ring_at(METAROCE_RING_SRQ, 4, RECV_WQE + 3 * SGE, start);
        let mut kernel = Taker::new(&ring);
        let polled = polled();
        let mut queue = RecvQueue::new(ring, 3, false, polled);
        let list = [sge(1, 2, 3), sge(4, 5, 6), sge(7, 8, 9)];
        assert_eq!(queue.push(0, &[sge(0, 0, 0); 4]), Err(EINVAL));
        for id in 0..4u64 {
            queue.push(id, &list[..id as usize % 4]).unwrap();
        }
        assert_eq!(queue.push(9, &[]), Err(ENOMEM));
        assert_eq!(kernel.waiting(), 0);
        queue.publish();
        for id in 0..4u64 {
            let (wqe, bytes) = kernel.take_recv().unwrap();
            assert_eq!((wqe.wr_id, wqe.num_sge, wqe.reserved), (id, id as u32 % 4, 0));
            assert_eq!(bytes, sge_bytes(&list[..id as usize % 4]));
            kernel.retire();
        }
        assert_eq!(queue.push(5, &[]), Err(ENOMEM));
        polled.fetch_add(1, Ordering::Release);
        queue.push(5, &[]).unwrap();
        assert_eq!(queue.push(6, &[]), Err(ENOMEM));
        queue.publish();
        assert_eq!(kernel.take_recv().unwrap().0.wr_id, 5);
    }
}

#[test]
fn a_shared_receive_is_free_when_it_has_been_polled_or_lost() {
    for start in [0, u32::MAX - 1] {
        let ring = ring_at(METAROCE_RING_SRQ, 4, RECV_WQE + 3 * SGE, start);
        let other = ring.other_side();
        let mut kernel = Taker::new(&ring);
        let polled = polled();
        let mut queue = RecvQueue::new(ring, 3, true, polled);
        for id in 0..4 {
            queue.push(id, &[]).unwrap();
        }
        queue.publish();
        for _ in 0..4 {
            kernel.take_recv().unwrap();
            kernel.retire();
        }
        assert_eq!(queue.push(9, &[]), Err(ENOMEM));
        other.arm().store(2, Ordering::Release);
        queue.push(4, &[]).unwrap();
        queue.push(5, &[]).unwrap();
        assert_eq!(queue.push(9, &[]), Err(ENOMEM));
        polled.fetch_add(1, Ordering::Release);
        queue.push(6, &[]).unwrap();
        assert_eq!(queue.push(9, &[]), Err(ENOMEM));
        queue.publish();
        assert_eq!(kernel.take_recv().unwrap().0.wr_id, 4);
        // Nobody can have polled what the kernel has not taken: slots 5 and 6 stay.
        polled.fetch_add(3, Ordering::Release);
        queue.push(7, &[]).unwrap();
        assert_eq!(queue.push(9, &[]), Err(ENOMEM));
    }
}

#[test]
fn completions_come_in_order_and_slots_go_back() {
    let ring = ring_at(METAROCE_RING_CQ, 4, 64, u32::MAX - 5);
    let mut kernel = Giver::new(&ring);
    let mut queue = CompletionQueue::new(ring);
    assert!(queue.next().is_none());
    let mut given = 0;
    let mut seen = 0;
    for _ in 0..5 {
        while kernel.give(cqe(given, 1)) {
            given += 1;
        }
        for id in drain(&mut queue) {
            assert_eq!(id, seen);
            seen += 1;
        }
    }
    assert_eq!((given, seen), (20, 20));
    // A slot is the kernel's again only after the release.
    for id in 0..4 {
        assert!(kernel.give(cqe(id, 1)));
    }
    queue.next().unwrap();
    assert!(!kernel.give(cqe(9, 1)));
    queue.release();
    assert!(kernel.give(cqe(9, 1)));
}

#[test]
fn purge_takes_one_queue_pair_and_keeps_the_order() {
    for start in [0, 3, u32::MAX - 2] {
        for pattern in 0..256u32 {
            for polled in 0..=4u32 {
                let ring = ring_at(METAROCE_RING_CQ, 8, 64, start);
                let mut kernel = Giver::new(&ring);
                let mut queue = CompletionQueue::new(ring);
                for bit in 0..8u32 {
                    assert!(kernel.give(cqe(u64::from(bit), 100 + ((pattern >> bit) & 1))));
                }
                for _ in 0..polled {
                    queue.next().unwrap();
                }
                let mut removed = Vec::new();
                queue.purge(101, |cqe| removed.push(cqe.wr_id));
                removed.reverse();
                let kept: Vec<u64> =
                    (polled..8).filter(|bit| (pattern >> bit) & 1 == 0).map(u64::from).collect();
                let gone: Vec<u64> =
                    (polled..8).filter(|bit| (pattern >> bit) & 1 == 1).map(u64::from).collect();
                assert_eq!(removed, gone);
                // What was removed makes room at once.
                let mut room = 0;
                while kernel.give(cqe(1000 + room, 1)) {
                    room += 1;
                }
                assert_eq!(room, 8 - kept.len() as u64);
                let all: Vec<u64> = kept.into_iter().chain(1000..1000 + room).collect();
                assert_eq!(drain(&mut queue), all, "start {start} pattern {pattern:b} polled {polled}");
            }
        }
    }
}

#[test]
fn purge_of_a_ring_that_makes_no_sense_ends() {
    let ring = ring_at(METAROCE_RING_CQ, 8, 64, 0);
    let other = ring.other_side();
    let mut queue = CompletionQueue::new(ring);
    other.producer().store(1 << 30, Ordering::Relaxed);
    queue.purge(0, |_| ());
    assert_eq!(other.consumer().load(Ordering::Relaxed), 0);
}

#[test]
fn a_resized_queue_goes_on_in_the_new_ring() {
    let old = ring_at(METAROCE_RING_CQ, 4, 64, 7);
    let mut queue = CompletionQueue::new(old);
    let new = ring_at(METAROCE_RING_CQ, 16, 128, 0);
    let mut kernel = Giver::new(&new);
    kernel.give(cqe(5, 1));
    kernel.give(cqe(6, 1));
    drop(queue.replace(new));
    assert_eq!(drain(&mut queue), [5, 6]);
    kernel.give(cqe(7, 1));
    assert_eq!(drain(&mut queue), [7]);
}

#[test]
fn states_for_posting() {
    use crate::ffi::sys::*;
    for (state, send, receive) in [
        (IBV_QPS_RESET, false, false),
        (IBV_QPS_INIT, false, true),
        (IBV_QPS_RTR, false, true),
        (IBV_QPS_RTS, true, true),
        (IBV_QPS_SQD, true, true),
        (IBV_QPS_SQE, true, true),
        (IBV_QPS_ERR, true, true),
        (IBV_QPS_UNKNOWN, false, false),
    ] {
        assert_eq!(may_send(state).is_ok(), send, "{state}");
        assert_eq!(may_receive(state).is_ok(), receive, "{state}");
    }
}

#[test]
fn the_lock_excludes() {
    const THREADS: u32 = 4;
    const ROUNDS: u32 = 20_000;
    let lock = Lock::new((0u32, 0u32));
    let inside = AtomicU32::new(0);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (lock, inside) = (&lock, &inside);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let mut guard = lock.lock();
                    assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0);
                    guard.0 += 1;
                    if (round + thread) % 512 == 0 {
                        // Long enough for the others to go to sleep.
                        thread::sleep(std::time::Duration::from_micros(200));
                    }
                    guard.1 += 1;
                    inside.fetch_sub(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(*lock.lock(), (THREADS * ROUNDS, THREADS * ROUNDS));
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn seeded(name: &str) -> Random {
        let seed = std::env::var("SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(|| {
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| time.as_nanos() as u64) | 1
        });
        println!("{name}: SEED={seed}");
        Random(seed)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}

/// What the payload of request `id` is made from.
fn pattern(id: u64) -> [metaroce_sge; 2] {
    [sge(id.wrapping_mul(0x9e37_79b9_7f4a_7c15), id as u32, !id as u32), sge(!id, 5, 6)]
}

/// Several programs' threads post, the kernel takes the requests and completes them, several
/// threads poll: every request is seen whole, once, in the order in which each thread posted, and
/// none is overwritten before it was taken.
#[test]
fn threads_around_a_queue_pair() {
    const POSTERS: u64 = 2;
    const EACH: u64 = 30_000;
    let mut random = Random::seeded("threads_around_a_queue_pair");
    let start = u32::MAX - random.below(1000) as u32;
    let sq = ring_at(METAROCE_RING_SQ, 16, STRIDE, start);
    let cq = ring_at(METAROCE_RING_CQ, 8, 64, start);
    let mut taker = Taker::new(&sq);
    let mut giver = Giver::new(&cq);
    let send_queue = Lock::new(SendQueue::new(sq, LIMITS, false, polled()));
    let completions = Lock::new(CompletionQueue::new(cq));
    let polled = AtomicU64::new(0);
    let failed = AtomicBool::new(false);
    /// Lets the other threads end when one fails, so that the test fails instead of hanging.
    struct Alarm<'a>(&'a AtomicBool);
    impl Drop for Alarm<'_> {
        fn drop(&mut self) {
            if thread::panicking() {
                self.0.store(true, Ordering::Relaxed);
            }
        }
    }
    thread::scope(|scope| {
        for poster in 0..POSTERS {
            let mut random = Random(random.below(u64::MAX) | 1);
            let (send_queue, failed) = (&send_queue, &failed);
            scope.spawn(move || {
                let _alarm = Alarm(failed);
                let mut next = 0;
                while next < EACH && !failed.load(Ordering::Relaxed) {
                    let mut queue = send_queue.lock();
                    for _ in 0..=random.below(5) {
                        if next == EACH {
                            break;
                        }
                        let id = (poster << 32) | next;
                        match queue.push(&send(id), |queue| queue.set_sges(&pattern(id))) {
                            Ok(()) => next += 1,
                            Err(error) => {
                                assert_eq!(error, ENOMEM);
                                break;
                            }
                        }
                    }
                    queue.publish();
                    drop(queue);
                    thread::yield_now();
                }
            });
        }
        let failed = &failed;
        scope.spawn(move || {
            let _alarm = Alarm(failed);
            let mut expected = [0; POSTERS as usize];
            for _ in 0..POSTERS * EACH {
                let (wqe, payload) = loop {
                    if failed.load(Ordering::Relaxed) {
                        return;
                    }
                    match taker.take_send() {
                        Some(request) => break request,
                        None => thread::yield_now(),
                    }
                };
                let poster = (wqe.wr_id >> 32) as usize;
                assert_eq!(wqe.wr_id & 0xffff_ffff, expected[poster]);
                expected[poster] += 1;
                assert_eq!(payload, sge_bytes(&pattern(wqe.wr_id)));
                taker.retire();
                while !giver.give(metaroce_cqe { byte_len: !wqe.wr_id as u32, ..cqe(wqe.wr_id, 1) }) {
                    if failed.load(Ordering::Relaxed) {
                        return;
                    }
                    thread::yield_now();
                }
            }
        });
        for _ in 0..2 {
            let (completions, polled) = (&completions, &polled);
            scope.spawn(move || {
                let _alarm = Alarm(failed);
                let mut last = [None; POSTERS as usize];
                while polled.load(Ordering::Relaxed) < POSTERS * EACH && !failed.load(Ordering::Relaxed) {
                    let mut queue = completions.lock();
                    let mut count = 0;
                    while let Some(cqe) = queue.next() {
                        assert_eq!(cqe.byte_len, !cqe.wr_id as u32);
                        let poster = (cqe.wr_id >> 32) as usize;
                        assert!(last[poster].is_none_or(|last| last < cqe.wr_id));
                        last[poster] = Some(cqe.wr_id);
                        count += 1;
                    }
                    queue.release();
                    drop(queue);
                    polled.fetch_add(count, Ordering::Relaxed);
                    thread::yield_now();
                }
            });
        }
    });
    assert_eq!(polled.load(Ordering::Relaxed), POSTERS * EACH);
}

/// Random queue pairs complete, are destroyed and purged while the kernel goes on: what is left
/// comes in order, and nothing of a destroyed queue pair is seen.
#[test]
fn purges_under_a_producing_kernel() {
    const COMPLETIONS: u64 = 20_000;
    let mut random = Random::seeded("purges_under_a_producing_kernel");
    let ring = ring_at(METAROCE_RING_CQ, 64, 64, u32::MAX - 100);
    let mut giver = Giver::new(&ring);
    let mut queue = CompletionQueue::new(ring);
    // Below this number of a queue pair, the kernel writes no more.
    let dead = AtomicU32::new(0);
    // A queue pair is destroyed when the kernel is between two completions.
    let writing = Lock::new(());
    thread::scope(|scope| {
        let mut kernel_random = Random(random.below(u64::MAX) | 1);
        let (dead_ref, writing_ref) = (&dead, &writing);
        let kernel = scope.spawn(move || {
            let mut id = 0;
            while id < COMPLETIONS {
                let guard = writing_ref.lock();
                let qpn = dead_ref.load(Ordering::Relaxed) + kernel_random.below(3) as u32;
                let given = giver.give(cqe(id, qpn));
                drop(guard);
                if given {
                    id += 1;
                }
                if !given || kernel_random.below(16) == 0 {
                    thread::yield_now();
                }
            }
        });
        let mut last = None;
        loop {
            let done = kernel.is_finished();
            for _ in 0..random.below(40) {
                let Some(cqe) = queue.next() else { break };
                assert!(last.is_none_or(|last| last < cqe.wr_id));
                assert!(cqe.qpn >= dead.load(Ordering::Relaxed));
                last = Some(cqe.wr_id);
            }
            queue.release();
            thread::yield_now();
            if random.below(4) == 0 {
                let guard = writing.lock();
                let qpn = dead.fetch_add(1, Ordering::Relaxed);
                drop(guard);
                queue.purge(qpn, |_| ());
            }
            if done {
                break;
            }
        }
        while let Some(cqe) = queue.next() {
            assert!(last.is_none_or(|last| last < cqe.wr_id));
            assert!(cqe.qpn >= dead.load(Ordering::Relaxed));
            last = Some(cqe.wr_id);
        }
    });
}
