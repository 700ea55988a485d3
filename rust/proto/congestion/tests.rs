// SPDX-License-Identifier: GPL-2.0

#![forbid(unsafe_code)]

use super::*;

const MS: Time = 1_000_000;

#[test]
fn shares_are_max_min() {
    let mut s = Shares::new(1_000_000, 8).expect("memory");
    let mut tickets = [None; 3];
    let mut shares = [0; 3];
    // Two want all they can get, one wants 10 Mbit/s.
    for round in 1..200u64 {
        for i in 0..3 {
            let used = if i == 2 {
                10_000.min(shares[2].max(1))
            } else {
                shares[i]
            };
            let (share, ticket) = s.report(round * MS / 4, tickets[i], used);
            tickets[i] = ticket;
            shares[i] = share;
        }
    }
    assert!((470_000..=500_000).contains(&shares[0]), "{shares:?}");
    assert!((470_000..=500_000).contains(&shares[1]), "{shares:?}");
    assert!((12_000..=60_000).contains(&shares[2]), "{shares:?}");
    // One is silent: the other gets nearly everything.
    for round in 400..700u64 {
        for i in 1..3 {
            let used = if i == 2 { 10_000 } else { shares[i] };
            let (share, ticket) = s.report(round * MS / 4, tickets[i], used);
            tickets[i] = ticket;
            shares[i] = share;
        }
    }
    assert!(shares[1] > 900_000, "{shares:?}");
    // Unknown speed: no shares. More senders than places: no limit for the last ones.
    let mut none = Shares::new(0, 8).expect("memory");
    assert_eq!(none.report(1, None, 5), (0, None));
    let mut small = Shares::new(1000, 1).expect("memory");
    assert!(small.report(MS, None, 5).1.is_some());
    assert_eq!(small.report(MS, None, 5), (0, None));
}

#[test]
fn one_packet_per_round_trip() {
    let c = Context {
        mtu: 4000,
        paths: 1,
        limited: true,
        cautious: false,
        lossy: false,
        slack: 1 << 20,
    };
    let mut w = Window::new(40_000);
    w.leave_slow_start();
    for _ in 0..10 {
        w.acked(4000, 1, &c);
    }
    assert!((43_500..=44_000).contains(&w.bytes()), "{}", w.bytes());
    // Not limited by the window: no growth.
    let before = w.bytes();
    w.acked(
        4000,
        1,
        &Context {
            limited: false,
            ..c
        },
    );
    assert_eq!(w.bytes(), before);
    // Sixteen cautious paths grow as one.
    let mut one = Window::new(4000);
    one.leave_slow_start();
    one.acked(
        4000,
        1,
        &Context {
            paths: 16,
            cautious: true,
            ..c
        },
    );
    assert_eq!(one.bytes(), 4000 + 250);
}

#[test]
fn cuts() {
    let mut w = Window::new(100_000);
    assert!(w.marked(10 * MS, 1, 9 * MS));
    // Alpha begins at a half: a quarter goes.
    assert_eq!(w.bytes(), 75_000);
    assert!(!w.marked(10 * MS, 1, 9 * MS), "once per round trip");
    assert!(w.lost_in_queue(12 * MS, 11 * MS, 0));
    assert_eq!(w.bytes(), 52_500);
    w.undo();
    assert_eq!(w.bytes(), 75_000);
    assert!(w.lost_in_queue(14 * MS, 13 * MS, 70_000));
    assert_eq!(w.bytes(), 70_000, "not below what the path delivers");
    for t in 15..100 {
        w.lost_in_queue(t * MS * 2, t * MS * 2 - 1, 0);
    }
    assert_eq!(w.bytes(), FLOOR);
}

#[test]
fn pacing() {
    let mut p = Pace::new();
    p.spend(MS, 1 << 20);
    assert_eq!(p.next(), 0, "without a rate");
    p.set_kbit(1_000_000);
    let mut now = MS;
    let start = now;
    let mut sent = 0u64;
    while sent < 1 << 20 {
        now = now.max(p.next());
        p.spend(now, 4000);
        sent += 4000;
    }
    let rate = sent * 8 * 1_000_000 / (now - start);
    // 64 KiB of 1 MiB go at once.
    assert!((1_000_000..1_080_000).contains(&rate), "{rate} kbit/s");
}
