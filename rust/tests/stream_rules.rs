// SPDX-License-Identifier: GPL-2.0

//! One test (at least) for each rule that a stream keeps; the names start with the rule.

mod stream_common;

use metaroce::proto::api::*;
use metaroce::proto::stream::{BlockStatus, State, StreamBlock};
use metaroce::proto::wire::Drop;
use stream_common::*;

const OK: Status = Status::Success;

fn received(events: &[Event]) -> Vec<(u32, u32, Status)> {
    events
        .iter()
        .filter_map(|e| match e {
            Event::RecvDone {
                rmsn,
                length,
                status,
                ..
            } => Some((*rmsn, *length, *status)),
            _ => None,
        })
        .collect()
}

fn released(events: &[Event]) -> Vec<Placement> {
    events
        .iter()
        .filter_map(|e| match e {
            Event::Release(p) => Some(*p),
            _ => None,
        })
        .collect()
}

fn error(events: &[Event]) -> Option<Option<Fault>> {
    events.iter().find_map(|e| match e {
        Event::StreamError { fault, .. } => Some(*fault),
        _ => None,
    })
}

#[test]
fn packets_carry_offset_total_and_address() {
    let mut p = Pair::new();
    p.post(write(0x1000, 2 * MTU + 10));
    let packets = p.packets(0);
    let seen: Vec<_> = packets
        .iter()
        .map(|x| (x.header.sseq, x.header.offset, x.len, x.header.last))
        .collect();
    assert_eq!(
        seen,
        [
            (100, 0, MTU, false),
            (101, MTU, MTU, false),
            (102, 2 * MTU, 10, true)
        ]
    );
    for x in &packets {
        let h = &x.header;
        assert_eq!((h.va, h.rkey, h.total, h.msn), (0x1000, 7, 2 * MTU + 10, 0));
        assert_eq!((h.dst_qpn, h.src_qpn), (2, 1));
    }
}

#[test]
fn sizes_around_the_mtu() {
    for (length, parts) in [
        (0, vec![0]),
        (1, vec![1]),
        (MTU - 1, vec![MTU - 1]),
        (MTU, vec![MTU]),
        (MTU + 1, vec![MTU, 1]),
        (3 * MTU, vec![MTU, MTU, MTU]),
    ] {
        let mut p = Pair::new();
        p.hosts[1].receives.push_back(1 << 20);
        p.post(send(length));
        let packets = p.packets(0);
        assert_eq!(packets.iter().map(|x| x.len).collect::<Vec<_>>(), parts);
        for x in packets.iter().rev() {
            assert_eq!(received(&p.events(1)), []);
            p.arrive(1, x);
        }
        assert_eq!(received(&p.events(1)), [(0, length, OK)]);
        p.acknowledge(1);
        assert_eq!(p.completions(0, 0), [OK]);
    }
}

#[test]
fn rule_1_completion_comes_from_the_block_alone() {
    let mut p = Pair::new();
    p.post(write(0, 10));
    let x = p.packets(0)[0];
    // The path has its acknowledgement, the stream has not.
    p.streams[0].released(p.now, x.packet);
    assert_eq!(p.completions(0, 0), []);
    assert_eq!(p.streams[0].quiet_since(Direction::Request), Some(p.now));
    let placement = p.place(1, &x);
    p.acknowledge(1);
    assert_eq!(p.completions(0, 0), [], "received is not in place");
    p.placed(1, &placement);
    assert_eq!(p.streams[1].take_dirty(), [true, false]);
    p.acknowledge(1);
    assert_eq!(p.completions(0, 0), [OK]);
    assert_eq!(p.streams[0].quiet_since(Direction::Request), None);
    assert_eq!(p.streams[0].poll_timeout(), None);
}

#[test]
fn rule_1_an_older_block_changes_nothing() {
    let mut p = Pair::new();
    p.post(write(0, 10));
    p.post(write(100, 10));
    let x = p.packets(0);
    p.arrive(1, &x[0]);
    let old = p.streams[1].block(Direction::Request);
    p.arrive(1, &x[1]);
    let new = p.streams[1].block(Direction::Request);
    p.streams[0].on_block(p.now, &new);
    p.streams[0].on_block(p.now, &old);
    assert_eq!(p.completions(0, 0), [OK, OK]);
    // One that acknowledges what was never sent is nobody's.
    p.post(write(0, 10));
    let bogus = StreamBlock {
        cumulative: 103,
        ..new
    };
    p.streams[0].on_block(p.now, &bogus);
    assert_eq!(p.completions(0, 2), []);

    let mut p = Pair::with(|a| a.window = 8);
    p.post(write(0, 20 * MTU));
    assert_eq!(p.packets(0).len(), 8);
    let bogus = StreamBlock {
        cumulative: 120,
        ..p.streams[1].block(Direction::Request)
    };
    p.streams[0].on_block(p.now, &bogus);
    assert_eq!(p.completions(0, 0), []);
    assert_eq!(p.packets(0).len(), 0);
}

#[test]
fn rule_3_what_arrives_late_of_an_older_round_counts() {
    let mut p = Pair::new();
    p.post(send(10));
    let x = p.packets(0);
    assert_eq!(p.deliver(1, &x[0]), Err(Drop::Refused));
    p.streams[0].released(p.now, x[0].packet);
    p.acknowledge(1);
    p.hosts[1].receives.push_back(10);
    p.arrive(1, &x[0]);
    p.acknowledge(1);
    assert_eq!(p.completions(0, 0), [OK]);
    assert_eq!(p.streams[0].quiet_since(Direction::Request), None);
    p.now += 100_000;
    p.streams[0].on_timeout(p.now);
    assert_eq!(p.packets(0).len(), 0);
    assert_eq!(p.streams[0].quiet_since(Direction::Request), None);
    assert_eq!(p.streams[0].poll_timeout(), None);
}

#[test]
fn rule_3_a_refusal_rewinds_once_and_void_takes_the_place_of_old_packets() {
    let mut p = Pair::new();
    p.post(write(0, 10));
    p.post(send(10));
    p.post(write(100, 10));
    let x = p.packets(0);
    p.arrive(1, &x[0]);
    assert_eq!(p.deliver(1, &x[1]), Err(Drop::Refused));
    let held = p.hold(1, &x[2]);
    p.acknowledge(1);
    p.acknowledge(1);
    assert_eq!(p.completions(0, 0), [OK]);
    // Accepted and renumbered content is void, on whatever path.
    let mut h = StreamHeader::default();
    for y in &x {
        assert!(!p.streams[0].rebuild(y.packet, &mut h));
    }
    assert_eq!(p.packets(0).len(), 0, "the timer has not passed");
    p.hosts[1].receives.push_back(10);
    p.now += 100_000;
    let again = p.packets(0);
    assert_eq!(again.len(), 2);
    assert_eq!(again[0].header.round, 1);
    assert!(p.streams[0].rebuild(again[0].packet, &mut h));
    assert_eq!(h, again[0].header);
    p.arrive(1, &again[0]);
    // What was taken before is a duplicate.
    assert_eq!(p.deliver(1, &again[1]), Err(Drop::StreamDuplicate));
    let events = p.events(1);
    assert_eq!(released(&events), [held]);
    p.placed(1, &held);
    p.acknowledge(1);
    assert_eq!(p.completions(0, 1), [OK, OK]);
}

#[test]
fn rule_3_not_ready_backs_off_and_ends_in_retry_exceeded() {
    let mut p = Pair::with(|a| a.timeout = 10_000_000);
    let start = p.now;
    p.post(write(0, 10));
    let mut waits = Vec::new();
    let status = loop {
        for x in p.packets(0) {
            let b = StreamBlock::not_ready(&x.header);
            p.streams[0].on_block(p.now, &b);
            // A second answer to the same round counts for nothing.
            p.streams[0].on_block(p.now, &b);
        }
        let t = p.streams[0].poll_timeout().expect("a timer");
        waits.push((t - p.now) / 1_000_000);
        p.now = t;
        p.streams[0].on_timeout(t);
        if let Some(status) = p.completions(0, 0).pop() {
            break status;
        }
    };
    assert_eq!(status, Status::RetryExceeded);
    assert_eq!(p.now - start, 80_000_000);
    assert_eq!(waits[..6], [1, 2, 4, 8, 10, 10]);
}

#[test]
fn rule_3_rtr_ends_the_wait() {
    let mut p = Pair::new();
    p.post(write(0, 10));
    let x = p.packets(0)[0];
    p.streams[0].on_block(p.now, &StreamBlock::not_ready(&x.header));
    assert_eq!(p.packets(0).len(), 0);
    let hello = p.streams[1].block(Direction::Request);
    p.streams[0].on_block(p.now, &hello);
    assert_eq!(p.packets(0).len(), 1);
}

#[test]
fn rule_3_no_room_comes_when_there_is_room_again() {
    let mut p = Pair::new();
    p.post(write(0, 2 * MTU));
    p.post(write(0x10000, 10));
    let x = p.packets(0);
    p.hosts[1].refuses_to_hold = true;
    assert_eq!(p.deliver(1, &x[2]), Err(Drop::Refused));
    assert_eq!(p.status(1), BlockStatus::Ok);
    p.arrive(1, &x[0]);
    assert_eq!(p.status(1), BlockStatus::Ok);
    p.arrive(1, &x[1]);
    assert_eq!(p.status(1), BlockStatus::NoRoom { round: 0 });
    p.acknowledge(1);
    let again = p.packets(0);
    assert_eq!(again.len(), 1);
    p.arrive(1, &again[0]);
    assert_eq!(p.status(1), BlockStatus::Ok);
    p.acknowledge(1);
    assert_eq!(p.completions(0, 0), [OK, OK]);
}

#[test]
fn rule_3_a_refused_packet_taken_later_does_not_hide_another() {
    let mut p = Pair::new();
    for i in 0..4 {
        p.post(write(i * 0x1000, 10));
    }
    let x = p.packets(0);
    p.hosts[1].refuses_to_hold = true;
    assert_eq!(p.deliver(1, &x[1]), Err(Drop::Refused));
    assert_eq!(p.deliver(1, &x[3]), Err(Drop::Refused));
    p.arrive(1, &x[0]);
    // A path sends the first refused one again in vain, and it fits now.
    p.arrive(1, &x[1]);
    p.arrive(1, &x[2]);
    p.acknowledge(1);
    let again = p.packets(0);
    assert_eq!(again.len(), 1, "the other refused packet comes again");
    p.arrive(1, &again[0]);
    p.acknowledge(1);
    assert_eq!(p.completions(0, 0), [OK; 4]);
}

#[test]
fn rule_3_packets_of_an_older_round_change_no_status() {
    let mut p = Pair::new();
    p.hosts[1].hides_count = true;
    p.post(send(10));
    p.post(send(10));
    p.post(write(0, 2 * MTU));
    let x = p.packets(0);
    assert_eq!(p.deliver(1, &x[0]), Err(Drop::Refused));
    p.acknowledge(1);
    p.now += 100_000;
    let again = p.packets(0);
    p.hosts[1].receives.push_back(10);
    p.arrive(1, &again[0]);
    assert_eq!(p.status(1), BlockStatus::Ok);
    assert_eq!(p.deliver(1, &again[1]), Err(Drop::Refused));
    let rnr = p.status(1);
    assert!(matches!(rnr, BlockStatus::Rnr { round: 1, .. }));
    // Late, but good.
    p.arrive(1, &x[2]);
    assert_eq!(p.status(1), rnr);
    assert_eq!(p.deliver(1, &x[1]), Err(Drop::Refused));
    assert_eq!(p.status(1), rnr);
}

#[test]
fn rule_3_not_ready_of_any_round_when_nothing_is_under_way() {
    let mut p = Pair::new();
    p.post(write(0, 10));
    let x = p.packets(0)[0];
    let mut h = x.header;
    h.round = 77;
    let block = StreamBlock::not_ready(&h);
    p.streams[0].on_block(p.now, &block);
    assert_eq!(p.streams[0].poll_timeout(), Some(p.now + 8_000_000));
    p.streams[0].released(p.now, x.packet);
    p.streams[0].on_block(p.now, &block);
    assert_eq!(p.streams[0].poll_timeout(), Some(p.now + 1_000_000));
}

#[test]
fn rule_9_window() {
    let mut p = Pair::with(|a| a.window = 8);
    p.post(write(0, 20 * MTU));
    let x = p.packets(0);
    assert_eq!(x.len(), 8);
    let mut beyond = x[0];
    beyond.header.sseq = 108;
    beyond.header.offset = 8 * MTU;
    assert_eq!(p.deliver(1, &beyond), Err(Drop::StreamWindow));
    for y in &x[1..] {
        p.arrive(1, y);
    }
    p.acknowledge(1);
    assert_eq!(p.packets(0).len(), 0);
    p.arrive(1, &x[0]);
    assert_eq!(p.cumulative(1), 108);
    p.acknowledge(1);
    assert_eq!(p.packets(0).len(), 8);
}

#[test]
fn rule_9_duplicates_touch_nothing() {
    let mut p = Pair::new();
    p.post(write(0, 3 * MTU));
    let x = p.packets(0);
    let first = p.place(1, &x[0]);
    assert_eq!(p.deliver(1, &x[0]), Err(Drop::StreamDuplicate));
    p.arrive(1, &x[1]);
    assert_eq!(p.deliver(1, &x[1]), Err(Drop::StreamDuplicate));
    p.placed(1, &first);
    // A second report of the same copy counts for nothing.
    p.placed(1, &first);
    assert_eq!(p.cumulative(1), 102);
    p.arrive(1, &x[2]);
    for y in &x {
        assert_eq!(p.deliver(1, y), Err(Drop::StreamDuplicate));
    }
    assert_eq!(p.cumulative(1), 103);
}

#[test]
fn rule_10_strangers_are_not_ready() {
    let mut p = Pair::new();
    p.post(write(0, 10));
    let mut x = p.packets(0)[0];
    x.header.src_qpn = 9;
    assert_eq!(p.deliver(1, &x), Err(Drop::UnknownStream));
    x.header.src_qpn = 1;
    x.header.sseq = 100u32.wrapping_sub(5000);
    assert_eq!(p.deliver(1, &x), Err(Drop::StreamWindow));
    assert_eq!(p.cumulative(1), 100);
}

#[test]
fn rule_11_in_place_is_reported_by_the_driver_in_any_order() {
    let mut p = Pair::new();
    p.hosts[1].receives.push_back(1000);
    p.post(send(3 * MTU));
    let x = p.packets(0);
    let places: Vec<_> = x.iter().map(|y| p.place(1, y)).collect();
    for (place, cumulative) in [(2, 100), (0, 101), (1, 103)] {
        assert_eq!(received(&p.events(1)), []);
        p.placed(1, &places[place]);
        assert_eq!(p.cumulative(1), cumulative);
    }
    assert_eq!(received(&p.events(1)), [(0, 3 * MTU, OK)]);
}

#[test]
fn rule_11_flushes_wait_for_copies() {
    let mut p = Pair::new();
    p.hosts[1].receives.push_back(1000);
    p.post(send(10));
    let x = p.packets(0)[0];
    let place = p.place(1, &x);
    p.streams[1].set_state(p.now, State::Err);
    assert_eq!(p.events(1), []);
    p.placed(1, &place);
    assert_eq!(error(&p.events(1)), Some(None));
    assert_eq!(p.cumulative(1), 100);

    // All of them.
    let mut p = Pair::new();
    p.hosts[1].receives.push_back(1000);
    p.post(send(3 * MTU));
    let x = p.packets(0);
    let places: Vec<_> = x.iter().map(|y| p.place(1, y)).collect();
    p.placed(1, &places[1]);
    p.streams[1].set_state(p.now, State::Err);
    p.placed(1, &places[0]);
    assert_eq!(p.events(1), []);
    p.placed(1, &places[2]);
    assert_eq!(error(&p.events(1)), Some(None));

    // The same for the answer to a READ.
    let mut p = Pair::new();
    p.post(read(0, 10));
    let x = p.packets(0)[0];
    p.arrive(1, &x);
    p.events(1);
    p.streams[1].read_ready(p.now, 0, Ok(()));
    let y = p.packets(1)[0];
    let place = p.place(0, &y);
    p.streams[0].set_state(p.now, State::Err);
    assert_eq!(p.events(0), []);
    p.placed(0, &place);
    assert_eq!(p.completions(0, 0), [Status::Flushed]);
}

#[test]
fn rule_11_a_failed_read_waits_for_copies() {
    let mut p = Pair::new();
    p.post(read(0, 2 * MTU));
    let x = p.packets(0)[0];
    p.arrive(1, &x);
    p.events(1);
    p.streams[1].read_ready(p.now, 0, Ok(()));
    let y = p.packets(1);
    p.acknowledge(1);
    let (first, second) = (p.place(0, &y[0]), p.place(0, &y[1]));
    p.placed_as(0, &second, Placed::Fault(Fault::Access));
    assert_eq!(p.completions(0, 0), [], "its buffer still changes");
    p.placed(0, &first);
    assert_eq!(p.completions(0, 0), [Status::LocalProtection]);
}

#[test]
fn rule_12_a_send_that_is_too_long_fails_at_both_ends() {
    let mut p = Pair::new();
    p.hosts[1].receives.extend([100, 100, 100]);
    p.post(send(100));
    p.post(send(101));
    p.post(send(5));
    let x = p.packets(0);
    assert_eq!(p.deliver(1, &x[1]), Ok(Receive::Done));
    assert_eq!(p.deliver(1, &x[2]), Ok(Receive::Done));
    assert_eq!(p.status(1), BlockStatus::Ok);
    p.arrive(1, &x[0]);
    let events = p.events(1);
    assert_eq!(
        received(&events),
        [(0, 100, OK), (1, 101, Status::LocalLength)]
    );
    assert_eq!(error(&events), Some(Some(Fault::InvalidRequest)));
    p.acknowledge(1);
    assert_eq!(
        p.completions(0, 0),
        [OK, Status::RemoteInvalidRequest, Status::Flushed]
    );
}

#[test]
fn rule_12_contradictions_are_dropped() {
    let mut p = Pair::new();
    p.hosts[1].receives.extend([1000, 1000]);
    p.post(send(2 * MTU));
    let x = p.packets(0);
    let bad = |f: &dyn Fn(&mut Packet)| {
        let mut y = x[1];
        f(&mut y);
        y
    };
    let mut all = vec![
        bad(&|y| y.header.offset = 2 * MTU),
        bad(&|y| y.header.total = MTU),
        bad(&|y| y.header.last = false),
        bad(&|y| y.len = 0),
        bad(&|y| y.header.msn = 2),
        bad(&|y| y.header.rmsn = u32::MAX),
        bad(&|y| y.header.offset = u32::MAX - 10),
    ];
    let mut write = x[1];
    write.header.opcode = Opcode::Write;
    write.header.after = Some(101);
    all.push(write);
    for y in &all {
        assert_eq!(p.deliver(1, y), Err(Drop::StreamInvalid), "{:?}", y.header);
    }
    p.arrive(1, &x[0]);
    // Another length for the same message.
    let y = bad(&|y| {
        y.header.total = 2 * MTU + 1;
        y.header.last = false;
    });
    assert_eq!(p.deliver(1, &y), Err(Drop::StreamInvalid));
    p.arrive(1, &x[1]);
    assert_eq!(received(&p.events(1)), [(0, 2 * MTU, OK)]);
}

#[test]
fn rule_13_faults_out_of_order() {
    let mut p = Pair::new();
    p.hosts[1].receives.push_back(100);
    p.post(send(10));
    p.post(write(0, 2 * MTU));
    p.post(write(0x10000, 10));
    p.post(write(0x20000, 10));
    let x = p.packets(0);
    // The copy of message 2 fails, then that of message 1; 3 is dropped.
    let held = p.hold(1, &x[4]);
    let second = p.hold(1, &x[3]);
    let body = p.place(1, &x[1]);
    p.placed_as(1, &second, Placed::Fault(Fault::Access));
    assert_eq!(p.events(1), [Event::Discard(held.token)]);
    assert_eq!(p.status(1), BlockStatus::Ok);
    p.placed_as(1, &body, Placed::Fault(Fault::Operation));
    assert_eq!(p.deliver(1, &x[4]), Err(Drop::StreamDuplicate));
    assert_eq!(p.deliver(1, &x[2]), Ok(Receive::Done));
    assert_eq!(p.status(1), BlockStatus::Ok);
    // An earlier message goes on.
    p.arrive(1, &x[0]);
    let fatal = BlockStatus::Fatal {
        msn: 1,
        fault: Fault::Operation,
    };
    assert_eq!(p.status(1), fatal);
    let events = p.events(1);
    assert_eq!(received(&events), [(0, 10, OK)]);
    assert_eq!(error(&events), Some(Some(Fault::Operation)));
    assert_eq!(p.streams[1].state(), State::Err);
    // The block is there for every query.
    p.streams[1].take_dirty();
    assert_eq!(p.deliver(1, &x[3]), Ok(Receive::Done));
    assert_eq!(p.streams[1].take_dirty(), [true, false]);
    p.acknowledge(1);
    assert_eq!(
        p.completions(0, 0),
        [
            OK,
            Status::RemoteOperation,
            Status::Flushed,
            Status::Flushed
        ]
    );
    assert_eq!(p.streams[0].state(), State::Err);
}

#[test]
fn rule_13_a_fault_waits_for_the_answers_of_earlier_reads() {
    let mut p = Pair::new();
    p.post(read(0, 10));
    p.post(write(0, 10));
    let x = p.packets(0);
    p.arrive(1, &x[0]);
    let held = p.hold(1, &x[1]);
    assert!(matches!(p.events(1)[..], [Event::Read { request: 0, .. }]));
    p.streams[1].read_ready(p.now, 0, Ok(()));
    assert_eq!(released(&p.events(1)), [held]);
    p.placed_as(1, &held, Placed::Fault(Fault::Access));
    assert_eq!(p.events(1), []);
    let y = p.packets(1)[0];
    p.arrive(0, &y);
    p.acknowledge(0);
    let events = p.events(1);
    assert_eq!(error(&events), Some(Some(Fault::Access)));
    assert!(events.contains(&Event::ReadReleased {
        stream: StreamId(2),
        request: 0
    }));
    p.acknowledge(1);
    assert_eq!(p.completions(0, 0), [OK, Status::RemoteAccess]);
}

#[test]
fn rule_13_a_receive_that_cannot_be_written() {
    let mut p = Pair::new();
    p.hosts[1].receives.push_back(100);
    p.post(send(10));
    let x = p.packets(0)[0];
    let place = p.place(1, &x);
    p.placed_as(1, &place, Placed::Fault(Fault::Access));
    let events = p.events(1);
    assert_eq!(received(&events), [(0, 10, Status::LocalProtection)]);
    assert_eq!(error(&events), Some(Some(Fault::Operation)));
    p.acknowledge(1);
    assert_eq!(p.completions(0, 0), [Status::RemoteOperation]);
}

#[test]
fn rule_14_overlapping_writes() {
    let mut p = Pair::new();
    p.post(write(0x1000, 2 * MTU));
    p.post(write(0x8000, 2 * MTU));
    p.post(write(0x1000 + u64::from(2 * MTU) - 1, 2 * MTU));
    p.post(write(0x1000 + u64::from(4 * MTU), 2 * MTU));
    let x = p.packets(0);
    let after: Vec<_> = x.iter().map(|y| y.header.after).collect();
    let (none, first) = (None, Some(101));
    assert_eq!(after, [none, none, none, none, first, first, none, none]);
    // A body packet of the third waits for the first Write, not for the second.
    let held = p.hold(1, &x[4]);
    p.arrive(1, &x[0]);
    assert_eq!(p.events(1), []);
    p.arrive(1, &x[1]);
    assert_eq!(released(&p.events(1)), [held]);
    p.placed(1, &held);
    assert_eq!(p.cumulative(1), 102);
    p.arrive(1, &x[2]);
    p.arrive(1, &x[3]);
    assert_eq!(p.cumulative(1), 105);
    // Accepted Writes are nobody's concern.
    p.acknowledge(1);
    p.post(write(0x1000, 1));
    assert_eq!(p.packets(0)[0].header.after, None);
}

#[test]
fn rule_14_older_writes_are_one_range() {
    let mut p = Pair::with(|a| a.window = 4096);
    // 64 slots of the send queue are not enough for 65 Writes and one more.
    let mut s = metaroce::proto::stream::Stream::new(256, 1).expect("memory");
    s.set_attr(&attr(1));
    s.set_state(0, State::Rtr);
    s.set_state(0, State::Rts);
    p.streams[0] = s;
    for i in 0..70u64 {
        p.post(write(i * 0x1000, 16));
    }
    p.post(write(0x2000, 16));
    // Between two of the older ones, where nothing was written: one range.
    p.post(write(0x2800, 16));
    // The same between two of the newer ones: exact.
    p.post(write(0x20800, 16));
    let x = p.packets(0);
    assert_eq!(x[70].header.after, Some(105), "last of the older ones");
    assert_eq!(x[71].header.after, Some(106));
    assert_eq!(x[72].header.after, None);
}

#[test]
fn rule_15_the_final_packet_of_a_write_is_held() {
    let mut p = Pair::new();
    p.post(write(0x1000, 2 * MTU));
    p.post(write(0x8000, 8));
    let x = p.packets(0);
    let flag = p.hold(1, &x[2]);
    let last = p.hold(1, &x[1]);
    assert!(flag.last && last.last);
    let body = p.place(1, &x[0]);
    assert!(!body.last);
    assert_eq!(p.events(1), [], "received is not enough");
    p.placed(1, &body);
    assert_eq!(p.events(1), [Event::Release(last)]);
    p.placed(1, &last);
    assert_eq!(p.events(1), [Event::Release(flag)]);
    p.placed(1, &flag);
    assert_eq!(p.cumulative(1), 103);
}

#[test]
fn rule_15_a_relaxed_target_may_be_copied_at_once() {
    let mut p = Pair::new();
    p.post(write(0x1000, 2 * MTU));
    let x = p.packets(0);
    let last = p.hold(1, &x[1]);
    p.placed(1, &last);
    p.arrive(1, &x[0]);
    assert_eq!(p.events(1), []);
    assert_eq!(p.cumulative(1), 102);
}

#[test]
fn rule_15_held_packets_of_a_dead_peer_are_given_up() {
    let mut p = Pair::new();
    for i in 0..4 {
        p.post(write(0x1000 * i, 10));
    }
    let x = p.packets(0);
    // 1 and 2 are held; 2 is copied by a driver in a hurry.
    p.hold(1, &x[1]);
    let second = p.hold(1, &x[2]);
    p.hold(1, &x[3]);
    // Somebody says that the peer is in ERR.
    let mut block = p.streams[0].block(Direction::Response);
    block.status = BlockStatus::NotReady { round: 0 };
    p.streams[1].on_block(p.now, &block);
    assert_eq!(p.events(1).len(), 3);
    p.placed(1, &second);
    // It is not, and gets what was given up by a rewind.
    p.arrive(1, &x[0]);
    assert_eq!(p.status(1), BlockStatus::NoRoom { round: 0 });
    p.acknowledge(1);
    let again = p.packets(0);
    assert_eq!(again.len(), 3);
    p.arrive(1, &again[0]);
    assert_eq!(p.deliver(1, &again[1]), Err(Drop::StreamDuplicate));
    p.arrive(1, &again[2]);
    assert_eq!(p.cumulative(1), 104);
    p.acknowledge(1);
    assert_eq!(p.completions(0, 0), [OK; 4]);
}

#[test]
fn rule_15_given_up_in_any_state() {
    // As above, with the packet that is given up at the edge of what was received.
    for copied in [false, true] {
        let mut p = Pair::new();
        p.post(write(0, 2 * MTU));
        p.post(write(0x1000, 2 * MTU));
        let x = p.packets(0);
        let body = p.place(1, &x[0]);
        let last = p.hold(1, &x[1]);
        let next = p.place(1, &x[2]);
        let mut block = p.streams[0].block(Direction::Response);
        block.status = BlockStatus::NotReady { round: 0 };
        p.streams[1].on_block(p.now, &block);
        if copied {
            p.placed(1, &last);
        }
        p.placed(1, &next);
        p.placed(1, &body);
        assert_eq!(p.cumulative(1), if copied { 103 } else { 101 });
        p.acknowledge(1);
        for y in p.packets(0) {
            match p.deliver(1, &y) {
                Ok(Receive::Place(place)) => p.placed(1, &place),
                Ok(Receive::Hold(place)) => {
                    assert!(released(&p.events(1)).contains(&place));
                    p.placed(1, &place);
                }
                Err(Drop::StreamDuplicate) => {}
                other => panic!("{other:?}"),
            }
        }
        if p.cumulative(1) == 103 {
            p.arrive(1, &x[3]);
        }
        assert_eq!(p.cumulative(1), 104);
        p.acknowledge(1);
        assert_eq!(p.completions(0, 0), [OK, OK]);
    }
}

#[test]
fn rule_15_records_come_back() {
    let mut p = Pair::new();
    for round in 0..40u64 {
        let first = p.post(write(0x1000, 8));
        for i in 1..60 {
            p.post(write(0x2000 + i * 8, 8));
        }
        let x = p.packets(0);
        let mut held: Vec<_> = x[1..].iter().map(|y| p.hold(1, y)).collect();
        if round % 2 == 0 {
            // Copied early, from the end.
            while let Some(h) = held.pop() {
                p.placed(1, &h);
            }
        }
        p.arrive(1, &x[0]);
        loop {
            let r = released(&p.events(1));
            if r.is_empty() {
                break;
            }
            r.iter().for_each(|h| p.placed(1, h));
        }
        p.acknowledge(1);
        assert_eq!(p.completions(0, first).len(), 60);
    }
}

#[test]
fn rule_16_receives_are_bound_in_message_order() {
    let mut p = Pair::new();
    p.hosts[1].receives.extend([100, 200, 300]);
    for _ in 0..3 {
        p.post(send(50));
    }
    let x = p.packets(0);
    p.arrive(1, &x[2]);
    assert_eq!(p.hosts[1].bound, [0, 1, 2]);
    p.arrive(1, &x[1]);
    assert_eq!(received(&p.events(1)), []);
    p.arrive(1, &x[0]);
    assert_eq!(
        received(&p.events(1)),
        [(0, 50, OK), (1, 50, OK), (2, 50, OK)]
    );
}

#[test]
fn rule_16_rnr_is_reported_in_its_turn_and_counted_once() {
    let mut p = Pair::with(|a| a.rnr_retry = 1);
    p.hosts[1].receives.push_back(100);
    for _ in 0..3 {
        p.post(send(50));
    }
    let x = p.packets(0);
    assert_eq!(p.deliver(1, &x[1]), Err(Drop::Refused));
    assert_eq!(p.deliver(1, &x[2]), Err(Drop::Refused));
    assert_eq!(p.status(1), BlockStatus::Ok);
    p.arrive(1, &x[0]);
    let rnr = BlockStatus::Rnr {
        rmsn: 1,
        timer_us: 100,
        round: 0,
    };
    assert_eq!(p.status(1), rnr);
    for _ in 0..5 {
        p.acknowledge(1);
    }
    assert_eq!(p.completions(0, 0), [OK]);
    assert_eq!(p.streams[0].poll_timeout(), Some(p.now + 100_000));
    p.now += 99_999;
    p.streams[0].on_timeout(p.now);
    assert!(!p.streams[0].can_send(p.now));
    p.now += 1;
    p.streams[0].on_timeout(p.now);
    // The refusal was progress; the limit runs from the end of the wait.
    assert_eq!(p.streams[0].poll_timeout(), Some(p.now + 8_000_000));
    // One message beyond the limit, not two.
    let again = p.packets(0);
    assert_eq!(again.len(), 1);
    // An old packet comes late: nothing of the new round was refused yet.
    assert_eq!(p.deliver(1, &x[2]), Err(Drop::Refused));
    p.acknowledge(1);
    assert_eq!(p.completions(0, 1), []);
    assert_eq!(p.deliver(1, &again[0]), Err(Drop::Refused));
    p.acknowledge(1);
    assert_eq!(
        p.completions(0, 1),
        [Status::RnrRetryExceeded, Status::Flushed]
    );
}

#[test]
fn rule_16_rnr_retry_7_is_forever_and_progress_forgives() {
    for retry in [2, 7] {
        let mut p = Pair::with(|a| a.rnr_retry = retry);
        for message in 0..3 {
            p.post(send(50));
            let times = if retry == 7 { 30 } else { 2 };
            for _ in 0..times {
                for x in p.packets(0) {
                    assert_eq!(p.deliver(1, &x), Err(Drop::Refused));
                }
                p.acknowledge(1);
                p.now += 100_000;
                p.streams[0].on_timeout(p.now);
            }
            p.hosts[1].receives.push_back(100);
            for x in p.packets(0) {
                p.arrive(1, &x);
            }
            p.acknowledge(1);
            assert_eq!(p.completions(0, message), [OK]);
        }
    }
}

#[test]
fn rule_16_credits() {
    let mut p = Pair::new();
    p.hosts[1].receives.extend([100, 100]);
    p.post(send(1));
    let x = p.packets(0);
    p.arrive(1, &x[0]);
    p.acknowledge(1);
    for _ in 0..5 {
        p.post(send(1));
    }
    // One receive is left, one message beyond it is allowed.
    let x = p.packets(0);
    assert_eq!(x.len(), 2);
    p.arrive(1, &x[0]);
    assert_eq!(p.deliver(1, &x[1]), Err(Drop::Refused));
    // New receives are announced to a peer that may be waiting.
    p.streams[1].take_dirty();
    p.hosts[1].receives.extend([100; 10]);
    p.streams[1].receives_changed(p.now, Some(10));
    assert_eq!(p.streams[1].take_dirty(), [true, false]);
    p.acknowledge(1);
    p.now += 100_000;
    assert_eq!(p.packets(0).len(), 4);
    assert_eq!(
        p.streams[1].block(Direction::Request).receive_limit,
        Some(12)
    );
}

#[test]
fn rule_16_write_with_immediate_takes_a_receive_with_its_final_packet() {
    let mut p = Pair::new();
    p.hosts[1].hides_count = true;
    let op = WrOp::WriteImm {
        va: 0x1000,
        rkey: 7,
        imm: 0xabcd,
    };
    p.post(wr(op, 2 * MTU));
    p.post(wr(op, 0));
    let x = p.packets(0);
    assert_eq!(x.len(), 3);
    p.arrive(1, &x[0]);
    assert_eq!(p.deliver(1, &x[1]), Err(Drop::Refused));
    assert!(matches!(p.status(1), BlockStatus::Rnr { rmsn: 0, .. }));
    // The buffer's length does not matter.
    p.hosts[1].receives.extend([0, 0]);
    p.acknowledge(1);
    p.now += 100_000;
    let x = p.packets(0);
    assert_eq!(x[0].header.offset, MTU);
    p.arrive(1, &x[1]);
    assert_eq!(received(&p.events(1)), []);
    p.arrive(1, &x[0]);
    let events = p.events(1);
    assert_eq!(
        events[..2],
        [(0, 2 * MTU), (1, 0)].map(|(rmsn, length)| Event::RecvDone {
            stream: StreamId(2),
            rmsn,
            opcode: Opcode::WriteImm,
            length,
            imm: 0xabcd,
            solicited: false,
            status: OK
        })
    );
}

#[test]
fn rule_17_requests_act_in_their_turn_and_once() {
    let mut p = Pair::new();
    p.post(write(0, 2 * MTU));
    p.post(fetch_add(0x100, 1));
    p.post(read(0, 10));
    let x = p.packets(0);
    p.arrive(1, &x[3]);
    p.arrive(1, &x[2]);
    assert_eq!(p.deliver(1, &x[2]), Err(Drop::StreamDuplicate));
    p.arrive(1, &x[0]);
    let last = p.place(1, &x[1]);
    assert_eq!(p.events(1), []);
    p.placed(1, &last);
    let events = p.events(1);
    assert!(
        matches!(
            events[..],
            [Event::Atomic {
                request: 0,
                compare_add: 1,
                ..
            }]
        ),
        "{events:?}"
    );
    assert_eq!(p.cumulative(1), 102);
    p.streams[1].atomic_done(p.now, 0, Ok(77));
    p.streams[1].atomic_done(p.now, 0, Ok(78));
    assert_eq!(p.cumulative(1), 103);
    assert!(matches!(p.events(1)[..], [Event::Read { request: 1, .. }]));
    p.streams[1].read_ready(p.now, 1, Ok(()));
    assert_eq!(p.cumulative(1), 104);
    for y in &x {
        assert_eq!(p.deliver(1, y), Err(Drop::StreamDuplicate));
    }
    assert_eq!(p.events(1), []);
    let y = p.packets(1);
    assert_eq!(y.len(), 2);
    p.acknowledge(1);
    // Accepted is not answered.
    assert_eq!(p.completions(0, 0), [OK]);
    p.arrive(0, &y[1]);
    assert_eq!(p.completions(0, 1), []);
    let place = p.place(0, &y[0]);
    assert_eq!(place.value, Some(77));
    assert_eq!(place.target, Target::Request { wr: 1 });
    p.placed(0, &place);
    assert_eq!(p.completions(0, 1), [OK, OK]);
    // A lost answer can be sent again until the block says that it has arrived.
    let mut h = StreamHeader::default();
    assert!(p.streams[1].rebuild(y[0].packet, &mut h));
    assert_eq!(h, y[0].header);
    p.acknowledge(0);
    assert!(!p.streams[1].rebuild(y[0].packet, &mut h));
    assert!(matches!(
        p.events(1)[..],
        [Event::ReadReleased { request: 1, .. }]
    ));
}

#[test]
fn rule_17_limits_and_oldest() {
    let mut p = Pair::with(|a| {
        a.max_rd_atomic = 2;
        a.max_dest_rd_atomic = 2;
    });
    for _ in 0..5 {
        p.post(read(0, 2 * MTU));
    }
    let mut done = 0;
    let mut waiting = Vec::new();
    while done < 5 {
        waiting.extend(p.packets(0));
        assert!(waiting.len() <= 2);
        for x in waiting.drain(..).rev() {
            assert!(x.header.request - x.header.oldest < 2);
            p.arrive(1, &x);
        }
        // The responder never hears that its answers have arrived: `oldest` says so.
        let mut answered = false;
        for e in p.events(1) {
            if let Event::Read { request, .. } = e {
                p.streams[1].read_ready(p.now, request, Ok(()));
                answered = true;
            }
        }
        if answered {
            continue;
        }
        for y in p.packets(1) {
            p.arrive(0, &y);
        }
        p.acknowledge(1);
        done += p.completions(0, done).len() as u32;
    }
    assert_eq!(p.status(1), BlockStatus::Ok);
}

#[test]
fn rule_17_too_many_reads_are_refused() {
    let mut p = Pair::with(|a| a.max_rd_atomic = 3);
    let mut a = *p.streams[1].attr();
    a.max_dest_rd_atomic = 2;
    p.streams[1].set_attr(&a);
    for _ in 0..3 {
        p.post(read(0, 10));
    }
    for x in p.packets(0) {
        p.arrive(1, &x);
    }
    for request in 0..2 {
        assert!(matches!(p.events(1)[..], [Event::Read { .. }]));
        p.streams[1].read_ready(p.now, request, Ok(()));
    }
    for y in p.packets(1) {
        p.arrive(0, &y);
    }
    p.acknowledge(0);
    assert_eq!(error(&p.events(1)), Some(Some(Fault::InvalidRequest)));
    p.acknowledge(1);
    assert_eq!(p.completions(0, 0), [OK, OK, Status::RemoteInvalidRequest]);
}

#[test]
fn rule_17_a_read_that_is_not_allowed() {
    let mut p = Pair::new();
    p.post(read(0, 10));
    p.post(write(0, 10));
    for x in p.packets(0) {
        let _ = p.deliver(1, &x);
    }
    assert!(matches!(p.events(1)[..], [Event::Read { .. }]));
    p.streams[1].read_ready(p.now, 0, Err(Fault::Access));
    assert_eq!(error(&p.events(1)), Some(Some(Fault::Access)));
    p.acknowledge(1);
    assert_eq!(p.completions(0, 0), [Status::RemoteAccess, Status::Flushed]);
}

#[test]
fn rule_17_remote_invalidation() {
    let mut p = Pair::new();
    p.hosts[1].receives.extend([100; 3]);
    p.post(write(0, 10));
    p.post(wr(WrOp::SendInv { rkey: 5 }, 10));
    p.post(wr(WrOp::SendInv { rkey: 6 }, 0));
    p.post(send(10));
    let x = p.packets(0);
    for y in x[1..].iter().rev() {
        p.arrive(1, y);
    }
    assert_eq!(p.events(1), []);
    p.arrive(1, &x[0]);
    let invalidate = |rkey| Event::Invalidate {
        stream: StreamId(2),
        rkey,
    };
    assert_eq!(p.events(1), [invalidate(5)]);
    assert_eq!(p.cumulative(1), 101, "not accepted before it has acted");
    p.streams[1].invalidated(p.now, Ok(()));
    let events = p.events(1);
    assert_eq!(received(&events), [(0, 10, OK)]);
    assert_eq!(events[1..], [invalidate(6)]);
    p.streams[1].invalidated(p.now, Ok(()));
    assert_eq!(received(&p.events(1)), [(1, 0, OK), (2, 10, OK)]);
    assert_eq!(p.cumulative(1), 104);
}

#[test]
fn rule_17_a_failed_invalidation_is_fatal() {
    let mut p = Pair::new();
    p.hosts[1].receives.extend([100; 3]);
    p.post(wr(WrOp::SendInv { rkey: 5 }, 10));
    for x in p.packets(0) {
        p.arrive(1, &x);
    }
    p.events(1);
    p.streams[1].invalidated(p.now, Err(Fault::Access));
    let events = p.events(1);
    assert_eq!(received(&events), []);
    assert_eq!(error(&events), Some(Some(Fault::Access)));
    p.acknowledge(1);
    assert_eq!(p.completions(0, 0), [Status::RemoteAccess]);
}

#[test]
fn rule_17_fence() {
    let mut p = Pair::new();
    p.post(read(0, 10));
    p.post(write(0x100, 1));
    p.post(SendWr {
        fence: true,
        ..write(0, 10)
    });
    let x = p.packets(0);
    assert_eq!(x.len(), 2);
    for y in &x {
        let _ = p.deliver(1, y);
    }
    p.events(1);
    p.streams[1].read_ready(p.now, 0, Ok(()));
    p.acknowledge(1);
    assert_eq!(p.packets(0).len(), 0);
    for y in p.packets(1) {
        p.arrive(0, &y);
    }
    assert_eq!(p.packets(0).len(), 1);
}

#[test]
fn rule_17_local_work_waits_and_is_waited_for() {
    let mut p = Pair::new();
    p.post(write(0, 10));
    p.post(wr(WrOp::Local, 0));
    p.post(write(0x100, 10));
    let x = p.packets(0);
    assert_eq!(x.len(), 1);
    p.arrive(1, &x[0]);
    assert_eq!(p.events(0), []);
    p.acknowledge(1);
    let stream = StreamId(1);
    assert_eq!(
        p.events(0),
        [
            Event::SendDone {
                stream,
                wr: 0,
                status: OK
            },
            Event::Local { stream, wr: 1 }
        ]
    );
    assert_eq!(p.packets(0).len(), 0);
    p.streams[0].local_done(p.now, 1, OK);
    assert_eq!(p.completions(0, 1), [OK]);
    let x = p.packets(0);
    p.arrive(1, &x[0]);
    p.acknowledge(1);
    assert_eq!(p.completions(0, 2), [OK]);
    // A failed one fails the QP.
    p.post(wr(WrOp::Local, 0));
    p.post(write(0, 1));
    p.events(0);
    p.streams[0].local_done(p.now, 3, Status::MwBind);
    assert_eq!(p.completions(0, 3), [Status::MwBind, Status::Flushed]);
}

#[test]
fn rule_18_retry_limit() {
    let mut p = Pair::new();
    p.post(write(0, 2 * MTU));
    p.post(write(0, 10));
    let x = p.packets(0);
    let start = p.now;
    assert_eq!(p.streams[0].poll_timeout(), Some(start + 8_000_000));
    // Progress starts it anew.
    p.now += 5_000_000;
    p.arrive(1, &x[0]);
    p.acknowledge(1);
    assert_eq!(p.streams[0].poll_timeout(), Some(p.now + 8_000_000));
    // A block without progress does not.
    p.now += 1_000_000;
    p.acknowledge(1);
    assert_eq!(p.streams[0].poll_timeout(), Some(p.now + 7_000_000));
    p.now += 7_000_000;
    p.streams[0].on_timeout(p.now);
    let events = p.events(0);
    let stream = StreamId(1);
    assert_eq!(
        events,
        [
            Event::SendDone {
                stream,
                wr: 0,
                status: Status::RetryExceeded
            },
            Event::StreamError {
                stream,
                fault: None
            },
            Event::SendDone {
                stream,
                wr: 1,
                status: Status::Flushed
            },
        ]
    );
    assert_eq!(p.streams[0].poll_timeout(), None);
}

#[test]
fn rule_18_timeout_0_is_never_and_reads_count() {
    let mut p = Pair::with(|a| a.timeout = 0);
    p.post(write(0, 10));
    p.packets(0);
    assert_eq!(p.streams[0].poll_timeout(), None);

    let mut p = Pair::new();
    p.post(read(0, 3 * MTU));
    let x = p.packets(0)[0];
    p.arrive(1, &x);
    p.events(1);
    p.streams[1].read_ready(p.now, 0, Ok(()));
    p.acknowledge(1);
    let y = p.packets(1);
    p.now += 7_000_000;
    p.arrive(0, &y[0]);
    assert_eq!(p.streams[0].poll_timeout(), Some(p.now + 8_000_000));
    p.now += 8_000_000;
    p.streams[0].on_timeout(p.now);
    assert_eq!(p.completions(0, 0), [Status::RetryExceeded]);
}

#[test]
fn rule_20_resume_and_loss_of_the_connection() {
    let mut p = Pair::new();
    p.post(write(0, 10));
    p.post(write(0x100, 10));
    let x = p.packets(0);
    p.arrive(1, &x[0]);
    p.streams[0].resume(p.now);
    let again = p.packets(0);
    assert_eq!(again.len(), 2);
    assert_eq!(p.deliver(1, &again[0]), Err(Drop::StreamDuplicate));
    p.arrive(1, &again[1]);
    p.acknowledge(1);
    assert_eq!(p.completions(0, 0), [OK, OK]);

    p.post(write(0, 10));
    p.packets(0);
    p.post(write(0x100, 10));
    p.streams[0].connection_lost(p.now);
    assert_eq!(
        p.completions(0, 2),
        [Status::RetryExceeded, Status::Flushed]
    );
    p.streams[1].connection_lost(p.now);
    assert_eq!(error(&p.events(1)), Some(None));
}

#[test]
fn a_wr_with_an_error_fails_in_its_turn() {
    let mut p = Pair::new();
    p.post(write(0, 10));
    p.post(SendWr {
        error: Some(Status::LocalProtection),
        ..write(0, 10)
    });
    p.post(write(0, 10));
    let x = p.packets(0);
    assert_eq!(x.len(), 1);
    assert_eq!(p.events(0), []);
    p.arrive(1, &x[0]);
    p.acknowledge(1);
    assert_eq!(
        p.completions(0, 0),
        [OK, Status::LocalProtection, Status::Flushed]
    );
    // Later WRs are taken and flushed.
    p.post(write(0, 10));
    assert_eq!(p.completions(0, 3), [Status::Flushed]);
    assert_eq!(p.packets(0).len(), 0);
}

#[test]
fn a_read_into_memory_that_cannot_be_written() {
    let mut p = Pair::new();
    p.post(write(0x1000, 10));
    p.post(read(0, 10));
    p.post(write(0, 10));
    let x = p.packets(0);
    for y in &x[..2] {
        p.arrive(1, y);
    }
    p.events(1);
    p.streams[1].read_ready(p.now, 0, Ok(()));
    let y = p.packets(1)[0];
    let place = p.place(0, &y);
    p.placed_as(0, &place, Placed::Fault(Fault::Access));
    assert_eq!(p.completions(0, 0), [], "an earlier one is unaccepted");
    p.acknowledge(1);
    assert_eq!(
        p.completions(0, 0),
        [OK, Status::LocalProtection, Status::Flushed]
    );
}

#[test]
fn answers_that_do_not_fit_are_dropped() {
    let mut p = Pair::new();
    p.post(read(0, 2 * MTU));
    let x = p.packets(0)[0];
    p.arrive(1, &x);
    p.events(1);
    p.streams[1].read_ready(p.now, 0, Ok(()));
    let y = p.packets(1);
    let bad = |f: &dyn Fn(&mut Packet)| {
        let mut z = y[0];
        f(&mut z);
        z
    };
    for z in [
        bad(&|z| z.header.request = 1),
        bad(&|z| z.header.request = u32::MAX),
        bad(&|z| z.header.total = 3 * MTU),
        bad(&|z| z.header.offset = 2 * MTU),
        bad(&|z| z.header.last = true),
        bad(&|z| z.len = 0),
        bad(&|z| {
            z.header.opcode = Opcode::AtomicResponse;
            z.len = 0;
        }),
    ] {
        assert_eq!(p.deliver(0, &z), Err(Drop::StreamInvalid), "{:?}", z.header);
    }
    // An end without a beginning is noticed.
    let mut z = y[1];
    z.header.sseq = y[0].header.sseq;
    p.acknowledge(1);
    p.arrive(0, &z);
    assert_eq!(p.completions(0, 0), [Status::BadResponse]);
}

#[test]
fn sqd_finishes_what_has_begun() {
    let mut p = Pair::with(|a| a.window = 4);
    p.post(write(0, 6 * MTU));
    p.post(write(0x10000, 10));
    let mut x = p.packets(0);
    assert_eq!(x.len(), 4);
    p.streams[0].set_state(p.now, State::Sqd);
    assert_eq!(p.events(0), []);
    for y in x.drain(..) {
        p.arrive(1, &y);
    }
    p.acknowledge(1);
    x = p.packets(0);
    assert_eq!(x.len(), 2);
    for y in x {
        p.arrive(1, &y);
    }
    p.acknowledge(1);
    let stream = StreamId(1);
    assert_eq!(
        p.events(0),
        [
            Event::SendDone {
                stream,
                wr: 0,
                status: OK
            },
            Event::Drained { stream }
        ]
    );
    assert_eq!(p.streams[0].poll_timeout(), None);
    p.streams[0].set_state(p.now, State::Rts);
    assert_eq!(p.packets(0).len(), 1);
}

#[test]
fn states_and_posting() {
    use metaroce::proto::stream::{PostError, Stream};
    let mut s = Stream::new(2, 1).expect("memory");
    s.set_attr(&attr(1));
    assert_eq!(s.post(0, write(0, 1)), Err(PostError::State));
    s.set_state(0, State::Rtr);
    assert_eq!(s.take_dirty(), [true, false]);
    assert_eq!(s.post(0, write(0, 1)), Err(PostError::State));
    s.set_state(0, State::Rts);
    assert_eq!(s.post(0, write(0, 1)), Ok(0));
    assert_eq!(s.post(0, write(0, 1)), Ok(1));
    assert_eq!(s.post(0, write(0, 1)), Err(PostError::Full));
    s.set_state(0, State::Err);
    let flushed = |wr| Event::SendDone {
        stream: StreamId(0),
        wr,
        status: Status::Flushed,
    };
    let events: Vec<_> = std::iter::from_fn(|| s.poll_event()).collect();
    assert_eq!(error(&events), Some(None));
    assert_eq!(events[1..], [flushed(0), flushed(1)]);
    s.reset();
    assert_eq!(s.state(), State::Reset);
    assert_eq!(s.poll_event(), None);
    s.set_state(0, State::Rtr);
    s.set_state(0, State::Rts);
    assert_eq!(s.post(0, write(0, 1)), Ok(0));
}

#[test]
fn established_once_in_rtr() {
    let mut p = Pair::new();
    p.streams[1].reset();
    p.streams[1].set_state(p.now, State::Rtr);
    p.post(write(0, 2 * MTU));
    for x in p.packets(0) {
        p.arrive(1, &x);
    }
    let stream = StreamId(2);
    assert_eq!(p.events(1), [Event::Established { stream }]);
    p.post(write(0, 10));
    for x in p.packets(0) {
        p.arrive(1, &x);
    }
    assert_eq!(p.events(1), []);
}

#[test]
fn tokens_of_another_generation_are_ignored() {
    let mut p = Pair::new();
    p.post(write(0, 10));
    let x = p.packets(0)[0];
    let place = p.place(1, &x);
    let mut old = place;
    old.token.generation += 1;
    p.placed(1, &old);
    assert_eq!(p.cumulative(1), 100);
    p.placed(1, &place);
    assert_eq!(p.cumulative(1), 101);
}

#[test]
fn memory_as_stated() {
    use metaroce::proto::stream::Stream;
    let least = Stream::memory(1, 1);
    let wr = Stream::memory(2, 1) - least;
    let slot = Stream::memory(1, 2) - least;
    println!("fixed {}, WR {wr}, slot {slot}", least - wr - slot);
    // PROTOCOL.md says so.
    assert!(least - wr - slot <= 22_400);
    assert!(wr <= 80);
    assert!(slot <= 64);
}

#[test]
fn sequences_wrap() {
    let psn = u32::MAX - 3;
    let mut p = Pair::new();
    for (i, s) in p.streams.iter_mut().enumerate() {
        s.reset();
        let mut a = attr(i as u32 + 1);
        a.sq_psn = psn;
        a.rq_psn = psn;
        s.set_attr(&a);
        s.set_state(0, State::Rtr);
        s.set_state(0, State::Rts);
    }
    p.hosts[1].receives.push_back(10_000);
    p.post(send(8 * MTU));
    p.post(read(0, 8 * MTU));
    let x = p.packets(0);
    for y in x.iter().rev() {
        p.arrive(1, y);
    }
    let events = p.events(1);
    assert_eq!(received(&events), [(0, 8 * MTU, OK)]);
    p.streams[1].read_ready(p.now, 0, Ok(()));
    for y in p.packets(1).iter().rev() {
        p.arrive(0, y);
    }
    p.acknowledge(1);
    assert_eq!(p.completions(0, 0), [OK, OK]);
}
