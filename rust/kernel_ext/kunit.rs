// SPDX-License-Identifier: GPL-2.0

//! KUnit: the unit tests of the protocol core, which cargo runs as well, on a kernel that checks
//! itself, and tests of what only the module has. A core test that fails panics, which ends the
//! machine with a message.
//!
//! C header: `include/kunit/test.h`. They run when the module is loaded on a kernel with
//! `kunit.enable=1`; selftests/kunit.sh shows what came of it.

use ::kernel::prelude::*;

/// Suites that call the tests of a module.
macro_rules! suites {
    ($($suite:ident: $short:ident in $($at:ident)::+ { $($test:ident,)* })*) => {$(
        #[kunit_tests($suite)]
        mod $short {
            use $($at)::+ as tests;
            $(
                #[test]
                fn $test() {
                    tests::$test();
                }
            )*
        }
    )*};
}

suites! {
    metaroce_wire: wire in crate::proto::wire::tests {
        void,
        the_longest_data_header,
        requests_and_responses,
        acknowledgements,
        probes_queries_and_ends,
        planes,
        handshakes,
        what_is_refused,
        payload_lengths,
        random_bytes_never_panic,
    }
    metaroce_connection: connection in crate::proto::connection::tests {
        memory_as_stated,
        memory_of_all_parts,
        choices_are_repeated_and_secrets_are_not,
    }
    metaroce_congestion: congestion in crate::proto::congestion::tests {
        shares_are_max_min,
        a_new_sender_gets_its_share_at_once,
        one_packet_per_round_trip,
        cuts,
        controllers_have_names,
        a_fixed_window_stays,
        pacing,
    }
    metaroce_directory: directory in crate::proto::directory::tests {
        against_a_list,
        a_lookup_among_4000_is_no_longer,
        a_reserved_place_is_kept,
    }
    metaroce_path_bits: path_bits in crate::proto::path::bits::tests {
        against_sets,
    }
    metaroce_path_receive: path_receive in crate::proto::path::receive::tests {
        gaps_and_duplicates,
        epochs,
    }
    metaroce_path_send: path_send in crate::proto::path::send::tests {
        memory_as_stated,
        a_gap_is_loss_and_a_lost_resend_is_seen,
        thresholds_and_spurious_resends,
        what_was_not_sent_cannot_be_acknowledged,
        rings_change_with_packets_in_flight,
        stamps_go_on_after_silence,
    }
    metaroce_pair: pair in crate::proto::pair {
        all_requests_on_a_good_link,
        all_requests_when_each_seventh_packet_is_lost,
    }
}

#[kunit_tests(metaroce_rings)]
mod rings {
    use crate::{
        bindings,
        queue::{CqRing, Memory, WorkRing},
    };
    use ::core::mem::{offset_of, size_of};
    use ::kernel::prelude::*;

    /// What the program writes at byte `at` of a ring, whose memory is mapped in its process.
    fn scribble(memory: &Memory, at: usize, value: u32) {
        if at + 4 <= memory.size() {
            // SAFETY: inside the memory; nobody else looks at it just now.
            unsafe { memory.as_ptr().add(at).cast::<u32>().write(value) };
        }
    }

    #[test]
    fn a_full_cq_takes_no_more() -> Result {
        let mut cq = CqRing::new(4)?;
        for n in 0..4u64 {
            assert!(cq.push(&[n; 8]));
        }
        assert!(!cq.push(&[9; 8]));
        assert_eq!(cq.unpolled(), 4);
        // Polled by the program.
        let consumer = offset_of!(bindings::metaroce_ring, consumer);
        scribble(cq.memory(), consumer, 2);
        assert_eq!(cq.unpolled(), 2);
        let mut larger = CqRing::new(2)?;
        cq.move_to(&mut larger)?;
        assert_eq!(larger.unpolled(), 2);
        // An index that makes no sense.
        scribble(cq.memory(), consumer, 77);
        assert!(cq.unpolled() > 4);
        assert!(!cq.push(&[9; 8]));
        assert!(cq.move_to(&mut larger).is_err());
        Ok(())
    }

    #[test]
    fn an_arm_is_taken_once() -> Result {
        let cq = CqRing::new(1)?;
        let arm = offset_of!(bindings::metaroce_ring, arm);
        assert!(!cq.take_arm(true));
        scribble(cq.memory(), arm, 1);
        assert!(!cq.take_arm(false));
        assert!(cq.take_arm(true));
        assert!(!cq.take_arm(true));
        scribble(cq.memory(), arm, 2);
        assert!(cq.take_arm(false));
        assert!(!cq.take_arm(false));
        Ok(())
    }

    #[test]
    fn no_more_is_filled_than_there_are_slots() -> Result {
        let ring = WorkRing::receive(8, 2)?;
        let producer = offset_of!(bindings::metaroce_ring, producer);
        assert_eq!(ring.filled(0), 0);
        for wild in [8, 9, 1 << 31, u32::MAX] {
            scribble(ring.memory(), producer, wild);
            assert_eq!(ring.filled(0), 8);
        }
        scribble(ring.memory(), producer, 3);
        assert_eq!(ring.filled(1), 2);
        // Across the end of the numbers.
        assert_eq!(ring.filled(3u32.wrapping_sub(5)), 5);
        Ok(())
    }

    #[test]
    fn words_outside_of_a_slot_read_as_nothing() -> Result {
        let ring = WorkRing::receive(2, 1)?;
        let slots = size_of::<bindings::metaroce_ring>();
        // A slot has a head of two words and an SGE of two.
        for word in 0..8 {
            scribble(ring.memory(), slots + word * 8, 0x1000 + word as u32);
        }
        let mut words = [1u64; 6];
        ring.read(0, 0, &mut words);
        assert_eq!(words, [0x1000, 0x1001, 0x1002, 0x1003, 0, 0]);
        ring.read(3, 2, &mut words);
        assert_eq!(words, [0x1006, 0x1007, 0, 0, 0, 0]);
        Ok(())
    }
}
