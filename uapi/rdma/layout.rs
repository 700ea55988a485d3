// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#![forbid(unsafe_code)]

//! The layout of `metaroce-abi.h` in numbers, at the version below.
//!
//! Kernel module (`rust/queue/abi.rs`) and plugin (`rdma-provider/src/abi.rs`) make their
//! structures from the header by bindgen and compile this file as well, each with its own compiler
//! and flags: a structure that one of them lays out otherwise does not compile. Since both follow
//! the header, that alone would let a changed header pass, and a module and a plugin of different
//! builds would meet under one version. So the numbers stand here once more: a field that is moved,
//! resized, renamed, added or removed fails both builds until they are changed, and the version
//! with them. (The structures of extensions, from `metaroce_connection` on, may grow at their end
//! without a new version: both sides say the size that they know.)
//!
//! Nothing is padded: structures are copied whole between the two, and hold no byte that nobody
//! wrote.

use super::bindings;
use ::core::mem::{offset_of, size_of};

// The version to which the numbers belong.
const _: () = assert!(
    bindings::METAROCE_ABI_VERSION == 2,
    "metaroce-abi.h has another version than uapi/rdma/layout.rs"
);

/// `structure: bytes { field: offset, ... }`, every field in its order.
macro_rules! layout {
    ($($name:ident: $size:literal { $($field:ident: $offset:literal),* $(,)? })*) => {
        $(const _: () = {
            use super::bindings::$name as Struct;
            // A pattern without `..`: no field is left out.
            fn _all(whole: Struct) {
                let Struct { $($field: _),* } = whole;
            }
            const fn bytes<F>(_: fn(&Struct) -> &F) -> usize {
                size_of::<F>()
            }
            let mut end = 0;
            $(
                assert!(
                    offset_of!(Struct, $field) == $offset,
                    concat!(stringify!($name), ".", stringify!($field), " has moved: ABI version?")
                );
                assert!(
                    end == $offset,
                    concat!(stringify!($name), " has padding before ", stringify!($field))
                );
                end += bytes(|whole| &whole.$field);
            )*
            assert!(
                size_of::<Struct>() == $size,
                concat!("the size of ", stringify!($name), " has changed: ABI version?")
            );
            assert!(end == $size, concat!(stringify!($name), " has padding at its end"));
        };)*
    };
}

layout! {
    metaroce_ring: 256 {
        magic: 0, kind: 4, entries: 8, stride: 12, slots_offset: 16, reserved0: 20, producer: 64,
        reserved1: 68, consumer: 128, reserved2: 132, arm: 192, reserved3: 196,
    }
    metaroce_mmap: 16 { offset: 0, size: 8 }
    metaroce_alloc_ucontext_req: 16 { abi_min: 0, abi_max: 4, reserved: 8 }
    metaroce_alloc_ucontext_resp: 16 { abi_version: 0, max_inline: 4, max_sge: 8, reserved: 12 }
    metaroce_create_cq_resp: 24 { ring: 0, entries: 16, cqn: 20 }
    metaroce_resize_cq_resp: 24 { ring: 0, entries: 16, reserved: 20 }
    metaroce_create_qp_req: 8 { cookie: 0 }
    metaroce_create_qp_resp: 40 { sq: 0, rq: 16, qpn: 32, max_inline: 36 }
    metaroce_create_srq_resp: 24 { ring: 0, srqn: 16, reserved: 20 }
    metaroce_sge: 16 { addr: 0, length: 8, lkey: 12 }
    metaroce_send_wqe: 64 {
        wr_id: 0, opcode: 8, flags: 12, remote_addr: 16, rkey: 24, imm_data: 28, compare_add: 32,
        swap: 40, num_sge: 48, inline_len: 52, reserved: 56,
    }
    metaroce_recv_wqe: 16 { wr_id: 0, num_sge: 8, reserved: 12 }
    metaroce_cqe: 64 {
        wr_id: 0, status: 8, opcode: 12, byte_len: 16, imm_data: 20, qpn: 24, src_qpn: 28,
        wc_flags: 32, vendor_err: 36, timestamp: 40, pkey_index: 48, wqe_index: 52, cookie: 56,
    }
    metaroce_connection: 216 {
        number: 0, now: 8, next_transition: 16, local_gid: 24, remote_gid: 40, state: 56,
        dscp: 60, paths: 64, paths_good: 68, qps: 72, payload_mtu: 76, window: 80, inflight: 88,
        share: 96, sent_packets: 104, sent_bytes: 112, rcvd_packets: 120, rcvd_bytes: 128,
        resent_packets: 136, spurious: 144, moved_packets: 152, ce_rcvd: 160, ce_echoed: 168,
        window_cuts: 176, wanted_paths: 184, ordering: 188, events: 192, reserved: 196, planes: 200,
        controller: 204, wanted_planes: 208, wanted_controller: 212,
    }
    metaroce_path: 104 {
        path: 0, plane: 4, state: 8, port: 12, epoch: 16, failures: 20, window: 24, inflight: 28,
        srtt: 32, min_rtt: 40, packets: 48, bytes: 56, resent: 64, moved: 72, ce: 80,
        received: 88, threshold: 96, peer_plane: 100,
    }
    metaroce_transition: 40 {
        number: 0, time: 8, path: 16, plane: 20, from_state: 24, to_state: 28, from_port: 32,
        to_port: 36,
    }
    metaroce_qp_attr: 24 { mask: 0, paths: 4, ordering: 8, events: 12, planes: 16, controller: 20 }
}
