// SPDX-License-Identifier: GPL-2.0

#![forbid(unsafe_code)]

use super::*;

const MS: Time = 1_000_000;

/// A window of the default controller.
fn aimd(bytes: u32) -> Window {
    let mut w = Window::new(Controller::Aimd);
    w.begin(bytes, 4000);
    w
}

/// Senders that want `wants` kbit/s each, for `time`; gives what each is granted.
fn senders<const N: usize>(s: &mut Shares, start: Time, time: Time, wants: &[u32; N]) -> [u32; N] {
    const STEP: Time = 10_000;
    let mut tickets = [None; N];
    let mut shares = [0u32; N];
    for step in 0..time / STEP {
        for i in 0..N {
            let rate = wants[i].min(if shares[i] == 0 { u32::MAX } else { shares[i] });
            let bytes = u64::from(rate.min(2_000_000)) * STEP / 8_000_000;
            if rate != 0 {
                let (share, ticket) = s.report(start + step * STEP, tickets[i], bytes);
                tickets[i] = ticket;
                shares[i] = share;
            }
        }
    }
    shares
}

#[cfg_attr(test, test)]
pub(crate) fn shares_are_max_min() {
    let mut s = Shares::new(1_000_000, 8).expect("memory");
    // Two want all they can get, one wants 100 Mbit/s.
    let shares = senders(&mut s, MS, 200 * MS, &[u32::MAX, u32::MAX, 100_000]);
    assert!((400_000..=450_000).contains(&shares[0]), "{shares:?}");
    assert_eq!(shares[0], shares[1]);
    assert!(shares[2] >= 100_000, "{shares:?}");
    // What nobody wants all of is not divided.
    let shares = senders(&mut s, 400 * MS, 50 * MS, &[300_000, 400_000]);
    assert_eq!(shares, [1_000_000; 2]);
    // One is left: it gets everything soon.
    senders(&mut s, 600 * MS, 50 * MS, &[u32::MAX, u32::MAX]);
    let shares = senders(&mut s, 650 * MS, 10 * MS, &[u32::MAX]);
    assert_eq!(shares, [1_000_000]);
    // Unknown speed: no shares. More senders than places: no limit for the last ones.
    let mut none = Shares::new(0, 8).expect("memory");
    assert_eq!(none.report(1, None, 5), (0, None));
    let mut small = Shares::new(1000, 1).expect("memory");
    assert!(small.report(MS, None, 5).1.is_some());
    assert_eq!(small.report(MS, None, 5), (0, None));
}

#[cfg_attr(test, test)]
pub(crate) fn a_new_sender_gets_its_share_at_once() {
    let mut s = Shares::new(1_000_000, 100).expect("memory");
    let (_, ticket) = s.report(MS, None, 9000);
    for i in 1..64 {
        let (share, _) = s.report(MS + i, None, 9000);
        assert_eq!(share, 984_375 / (i as u32 + 1));
    }
    // The first one hears of it in its next report.
    let (share, _) = s.report(MS + 100, ticket, 9000);
    assert_eq!(share, 984_375 / 64);
}

// Too much for the stack of a kernel.
#[cfg(test)]
#[test]
fn thousands_of_senders() {
    const N: u64 = 4096;
    let line = 400_000_000;
    let mut s = Shares::new(line, N as usize).expect("memory");
    let all = line - line / 64;
    let mut tickets = [None; N as usize];
    // Each newcomer counts at once, within the 100 us in which the level is not computed anew.
    let mut now = MS;
    for (i, t) in (0u32..).zip(tickets.iter_mut()) {
        now += 20;
        let (share, ticket) = s.report(now, None, 4000);
        assert!(ticket.is_some());
        *t = ticket;
        if i > 0 {
            let fair = all / (i + 1);
            assert!((fair..=fair + fair / 50).contains(&share), "{i}: {share}");
        }
    }
    // One more has no place and no limit; nobody else is disturbed.
    assert_eq!(s.report(now, None, 4000), (0, None));
    // All go on at their share: it stays.
    let fair = u64::from(all) / N;
    let mut share = 0;
    for _ in 0..N {
        now += 100;
        for t in tickets.iter_mut().take(40) {
            (share, *t) = s.report(now, *t, 123);
        }
        tickets.rotate_left(40);
    }
    assert!((fair / 2..=fair * 2).contains(&u64::from(share)), "{share}");
    // Ten are left: soon they have what the others had.
    let ends = now + 300 * MS;
    while now < ends {
        now += MS;
        for t in tickets.iter_mut().take(10) {
            (share, *t) = s.report(now, *t, 10_000_000);
        }
    }
    assert!(share >= all / 10, "{share}");
    // Places of those that are gone are given to others.
    assert!((0..N / 16).any(|_| s.report(now, None, 4000).1.is_some()));
}

#[cfg_attr(test, test)]
pub(crate) fn one_packet_per_round_trip() {
    let c = Context {
        mtu: 4000,
        paths: 1,
        limited: true,
        cautious: false,
        lossy: false,
        slack: 1 << 20,
    };
    let mut w = aimd(40_000);
    w.queue();
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
    let mut one = aimd(4000);
    one.queue();
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

#[cfg_attr(test, test)]
pub(crate) fn cuts() {
    let mut w = aimd(100_000);
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

#[cfg_attr(test, test)]
pub(crate) fn controllers_have_names() {
    for c in Controller::ALL {
        assert_eq!(Controller::from_name(c.name()), Some(c));
    }
    assert_eq!(Controller::from_name("aimd"), Some(Controller::default()));
    assert_eq!(Controller::from_name("fixed"), Some(Controller::Fixed));
    for name in ["", "Aimd", "aimd ", "cubic"] {
        assert_eq!(Controller::from_name(name), None);
    }
}

#[cfg_attr(test, test)]
pub(crate) fn a_fixed_window_stays() {
    let c = Context {
        mtu: 4000,
        paths: 4,
        limited: true,
        cautious: false,
        lossy: false,
        slack: 0,
    };
    let mut w = Window::new(Controller::Fixed);
    // Whatever a connection wishes to begin with.
    for start in [0, 4000, 1 << 30] {
        w.begin(start, 4000);
        assert_eq!(w.bytes(), 4000 * fixed::PACKETS);
    }
    for t in 1..200 {
        let now = t * MS;
        w.acked(4000, 1, &c);
        w.queue();
        assert!(!w.marked(now, 1, now - MS));
        assert!(!w.lost_in_queue(now, now - MS, 0));
        w.lost(8);
        w.undo();
        w.round(now, MS, MS, &c);
        assert_eq!(w.bytes(), 4000 * fixed::PACKETS);
    }
    // It delivers 4000 bytes in a millisecond; that is measured all the same.
    assert!((3_900_000..4_100_000).contains(&w.rate()), "{}", w.rate());
}

#[cfg_attr(test, test)]
pub(crate) fn pacing() {
    let mut p = Pace::new();
    p.spend(MS, 1 << 20);
    assert_eq!(p.next(), 0, "without a rate");
    p.set_kbit(MS, 1_000_000);
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
    // A higher rate holds at once.
    let wait = p.next().saturating_sub(now);
    p.set_kbit(now, 100_000_000);
    assert!(p.next().saturating_sub(now) <= wait / 99);
}
