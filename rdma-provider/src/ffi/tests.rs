// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB

//! The C side without a device: requests and completions in libibverbs' structures, the rings in
//! plain memory, and a pipe where the device is opened, so that each doorbell can be read.

use std::ffi::c_char;
use std::fs::File;
use std::io::Read;
use std::mem::zeroed as zero;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::UnixStream;
use std::ptr::{null, null_mut};

use super::cq::Cq;
use super::qp::Qp;
use super::*;
use crate::abi::*;
use crate::errno::{EINVAL, ENOENT, ENOMEM, EOPNOTSUPP};
use crate::queue::{CompletionQueue, Limits, RecvQueue, SendQueue};
use crate::ring::Ring;
use crate::tests::polled;
use std::sync::atomic::{AtomicU32, Ordering};

const LIMITS: Limits = Limits { max_sge: 3, max_inline: 100, max_message: 1 << 31 };
const QPN: u32 = 17;
const HANDLE: u32 = 23;

/// A queue pair over plain memory.
struct Bench {
    /// What has been polled of the send queue.
    polled: &'static AtomicU32,
    /// The same of the receive queue.
    received: &'static AtomicU32,
    qp: Box<Qp>,
    cq: Box<Cq>,
    context: Box<sys::ibv_context>,
    sq: Ring,
    rq: Ring,
    completions: Ring,
    taken: u32,
    bells: File,
    _bell: File,
}

impl Bench {
    fn new() -> Bench {
        let mut ends = [0; 2];
        // SAFETY: room for two descriptors; each is owned by one File.
        let (bells, bell) = unsafe {
            extern "C" {
                fn pipe2(ends: *mut c_int, flags: c_int) -> c_int;
            }
            const O_NONBLOCK: c_int = 0o4000;
            assert_eq!(pipe2(ends.as_mut_ptr(), O_NONBLOCK), 0);
            (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
        };
        // SAFETY: integers and pointers.
        let mut context: Box<sys::ibv_context> = Box::new(unsafe { zero() });
        context.cmd_fd = bell.as_raw_fd();
        let sq = Ring::anonymous(METAROCE_RING_SQ, 4, SEND_WQE + 112);
        let rq = Ring::anonymous(METAROCE_RING_RQ, 4, RECV_WQE + 2 * SGE);
        let completions = Ring::anonymous(METAROCE_RING_CQ, 8, size_of::<metaroce_cqe>());
        let (sq_kernel, rq_kernel, cq_kernel) = (sq.other_side(), rq.other_side(), completions.other_side());
        let (polled, received) = (polled(), polled());
        let send_queue = SendQueue::new(sq, LIMITS, false, polled);
        let receive_queue = RecvQueue::new(rq, 2, false, received);
        let mut qp = Box::new(Qp::over(send_queue, Some(receive_queue)));
        let cq = Box::new(Cq::over(CompletionQueue::new(completions), cq_kernel.arm_word()));
        // SAFETY: the queue pair is ours.
        unsafe {
            let ibqp = &mut *(&raw mut *qp).cast::<sys::ibv_qp>();
            ibqp.context = &mut *context;
            ibqp.handle = HANDLE;
            ibqp.qp_num = QPN;
            ibqp.state = sys::IBV_QPS_RTS;
            ibqp.send_cq = (&raw const *cq).cast_mut().cast();
            ibqp.recv_cq = ibqp.send_cq;
            wr::set_ops(&mut *(&raw mut *qp).cast::<sys::ibv_qp_ex>(), wr::SEND_OPS);
        }
        Bench {
            polled,
            received,
            qp,
            cq,
            context,
            sq: sq_kernel,
            rq: rq_kernel,
            completions: cq_kernel,
            taken: 0,
            bells,
            _bell: bell,
        }
    }

    fn qp(&mut self) -> *mut sys::ibv_qp {
        (&raw mut *self.qp).cast()
    }

    fn ex(&mut self) -> &mut sys::ibv_qp_ex {
        // SAFETY: it is at the start of the queue pair.
        unsafe { &mut *(&raw mut *self.qp).cast::<sys::ibv_qp_ex>() }
    }

    fn cq(&mut self) -> *mut sys::ibv_cq {
        (&raw mut *self.cq).cast()
    }

    fn set_state(&mut self, state: u32) {
        // SAFETY: the queue pair is ours.
        unsafe { (*self.qp()).state = state };
    }

    /// The number of doorbells since the last call; each has to be right.
    fn rung(&mut self) -> usize {
        let mut bytes = Vec::new();
        let _ = self.bells.read_to_end(&mut bytes);
        // Header, then response, qp_handle, wr_count, sge_count, wqe_size.
        const BELL: usize = 8 + 8 + 4 * 4;
        assert_eq!(bytes.len() % BELL, 0);
        for bell in bytes.chunks(BELL) {
            let word = |at: usize| u32::from_ne_bytes(bell[at..at + 4].try_into().unwrap());
            assert_eq!(word(0), 28, "POST_SEND");
            assert_eq!(word(4), (1 << 16) | 8, "words out and in");
            assert_eq!((word(16), word(20), word(24)), (HANDLE, 0, 0));
            assert_eq!(word(28), size_of::<sys::ib_uverbs_send_wr>() as u32);
        }
        bytes.len() / BELL
    }

    fn post(&mut self, wr: &mut sys::ibv_send_wr) -> (c_int, *mut sys::ibv_send_wr) {
        let mut bad = null_mut();
        // SAFETY: the list is valid.
        let error = unsafe { qp::post_send(self.qp(), wr, &mut bad) };
        (error, bad)
    }

    /// The requests that the kernel finds.
    fn taken(&mut self) -> Vec<(metaroce_send_wqe, Vec<u8>)> {
        let mut all = Vec::new();
        while self.taken != self.sq.producer().load(Ordering::Acquire) {
            let slot = self.sq.slot(self.taken);
            let wqe: metaroce_send_wqe = slot.get().unwrap();
            all.push((wqe, slot.bytes(SEND_WQE, wqe.num_sge as usize * SGE + wqe.inline_len as usize)));
            self.taken += 1;
        }
        self.sq.consumer().store(self.taken, Ordering::Release);
        self.polled.store(self.taken, Ordering::Release);
        all
    }

    fn give(&mut self, cqe: metaroce_cqe) {
        let index = self.completions.producer().load(Ordering::Relaxed);
        self.completions.slot(index).put(0, &[cqe]).unwrap();
        self.completions.producer().store(index.wrapping_add(1), Ordering::Release);
    }
}

fn send_wr(opcode: u32, flags: u32, list: &mut [sys::ibv_sge]) -> sys::ibv_send_wr {
    // SAFETY: integers and pointers.
    let mut wr: sys::ibv_send_wr = unsafe { zero() };
    wr.wr_id = 77;
    wr.opcode = opcode;
    wr.send_flags = flags;
    wr.sg_list = list.as_mut_ptr();
    wr.num_sge = list.len() as c_int;
    wr
}

fn sge(addr: u64, length: u32, lkey: u32) -> sys::ibv_sge {
    sys::ibv_sge { addr, length, lkey }
}

#[test]
fn post_send_rings_once_for_a_list() {
    let mut bench = Bench::new();
    let mut list = [sge(0x1000, 10, 1), sge(0x2000, 20, 2)];
    let mut third = send_wr(sys::IBV_WR_SEND_WITH_IMM, sys::IBV_SEND_SIGNALED, &mut list);
    third.__bindgen_anon_1.imm_data = 0x1234;
    let mut second = send_wr(sys::IBV_WR_RDMA_READ, 0, &mut list);
    second.wr.rdma.remote_addr = 0xabc;
    second.wr.rdma.rkey = 0xdef;
    second.next = &mut third;
    let mut first = send_wr(sys::IBV_WR_ATOMIC_CMP_AND_SWP, sys::IBV_SEND_FENCE, &mut list);
    first.wr.atomic =
        sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_2 { remote_addr: 1, compare_add: 2, swap: 3, rkey: 4 };
    first.next = &mut second;
    assert_eq!(bench.post(&mut first), (0, null_mut()));
    assert_eq!(bench.rung(), 1);
    let taken = bench.taken();
    assert_eq!(taken.len(), 3);
    let wqe = taken[0].0;
    assert_eq!((wqe.remote_addr, wqe.compare_add, wqe.swap, wqe.rkey), (1, 2, 3, 4));
    assert_eq!((wqe.wr_id, wqe.flags, wqe.imm_data), (77, METAROCE_SEND_FENCE, 0));
    assert_eq!(
        (taken[1].0.opcode, taken[1].0.remote_addr, taken[1].0.rkey),
        (METAROCE_WR_RDMA_READ, 0xabc, 0xdef)
    );
    assert_eq!((taken[2].0.imm_data, taken[2].0.flags, taken[2].0.rkey), (0x1234, METAROCE_SEND_SIGNALED, 0));
    assert_eq!(taken[2].1[0..8], 0x1000u64.to_ne_bytes());
    assert_eq!(taken[2].1[24..32], [20, 0, 0, 0, 2, 0, 0, 0]);
}

#[test]
fn post_send_names_the_first_bad_request() {
    let mut bench = Bench::new();
    let mut list = [sge(0, 1, 1); 4];
    let mut bad = send_wr(sys::IBV_WR_SEND, 0, &mut list);
    let mut good = send_wr(sys::IBV_WR_SEND, 0, &mut list[..3]);
    good.next = &mut bad;
    assert_eq!(bench.post(&mut good), (EINVAL, &raw mut bad));
    // The good one is on its way.
    assert_eq!(bench.rung(), 1);
    assert_eq!(bench.taken().len(), 1);

    let refused: [(u32, u32, c_int, c_int); 9] = [
        (sys::IBV_WR_SEND, 0, -1, EINVAL),
        (sys::IBV_WR_SEND, 0, 4, EINVAL),
        (sys::IBV_WR_SEND, 0, c_int::MAX, EINVAL),
        (sys::IBV_WR_BIND_MW, 0, 1, EOPNOTSUPP),
        (sys::IBV_WR_TSO, 0, 1, EINVAL),
        (sys::IBV_WR_DRIVER1, 0, 1, EINVAL),
        (1000, 0, 1, EINVAL),
        (sys::IBV_WR_SEND, sys::IBV_SEND_IP_CSUM, 1, EINVAL),
        (sys::IBV_WR_RDMA_READ, sys::IBV_SEND_INLINE, 1, EINVAL),
    ];
    for (opcode, flags, count, error) in refused {
        let mut wr = send_wr(opcode, flags, &mut list);
        wr.num_sge = count;
        assert_eq!(bench.post(&mut wr), (error, &raw mut wr), "{opcode} {flags} {count}");
    }
    let mut wr = send_wr(sys::IBV_WR_SEND, 0, &mut list);
    wr.sg_list = null_mut();
    assert_eq!(bench.post(&mut wr).0, EINVAL);
    let mut large = [sge(0, 1 << 31, 1), sge(0, 1, 1)];
    assert_eq!(bench.post(&mut send_wr(sys::IBV_WR_SEND, 0, &mut large)).0, EINVAL);
    assert_eq!(bench.rung(), 0);
    assert!(bench.taken().is_empty());
    assert_eq!(bench.post(&mut send_wr(sys::IBV_WR_SEND, 0, &mut large[..1])).0, 0);

    for _ in 0..3 {
        assert_eq!(bench.post(&mut send_wr(sys::IBV_WR_SEND, 0, &mut [])).0, 0);
    }
    let mut full = send_wr(sys::IBV_WR_SEND, 0, &mut []);
    assert_eq!(bench.post(&mut full), (ENOMEM, &raw mut full));
}

#[test]
fn post_send_looks_at_the_state() {
    let mut bench = Bench::new();
    for state in [sys::IBV_QPS_RESET, sys::IBV_QPS_INIT, sys::IBV_QPS_RTR] {
        bench.set_state(state);
        let mut wr = send_wr(sys::IBV_WR_SEND, 0, &mut []);
        assert_eq!(bench.post(&mut wr), (EINVAL, &raw mut wr));
    }
    assert_eq!(bench.rung(), 0);
    bench.set_state(sys::IBV_QPS_ERR);
    assert_eq!(bench.post(&mut send_wr(sys::IBV_WR_SEND, 0, &mut [])).0, 0);
    assert_eq!(bench.rung(), 1);
}

#[test]
fn inline_data_is_copied_up_to_the_maximum() {
    let mut bench = Bench::new();
    let bytes: Vec<u8> = (0..200).collect();
    let at = |from: usize, length: usize| sge(bytes[from..].as_ptr() as u64, length as u32, 0);
    for (lengths, error) in
        [(vec![100], 0), (vec![60, 40], 0), (vec![101], EINVAL), (vec![60, 41], EINVAL), (vec![60, 0, 40], 0)]
    {
        let mut from = 0;
        let mut list: Vec<_> = lengths
            .iter()
            .map(|length| {
                from += length;
                at(from - length, *length)
            })
            .collect();
        let mut wr = send_wr(sys::IBV_WR_RDMA_WRITE, sys::IBV_SEND_INLINE, &mut list);
        assert_eq!(bench.post(&mut wr).0, error, "{lengths:?}");
        if error == 0 {
            let (wqe, data) = bench.taken().pop().unwrap();
            assert_eq!((wqe.flags, wqe.num_sge, wqe.inline_len), (METAROCE_SEND_INLINE, 0, 100));
            assert_eq!(data, bytes[..100]);
        }
    }
    // Nothing to carry: no inline data.
    let mut wr = send_wr(sys::IBV_WR_SEND, sys::IBV_SEND_INLINE, &mut []);
    assert_eq!(bench.post(&mut wr).0, 0);
    let (wqe, _) = bench.taken().pop().unwrap();
    assert_eq!((wqe.flags, wqe.num_sge, wqe.inline_len), (0, 0, 0));
}

#[test]
fn requests_by_steps() {
    let mut bench = Bench::new();
    let bytes: Vec<u8> = (0..50).collect();
    let ex: *mut sys::ibv_qp_ex = bench.ex();
    // SAFETY: the functions are called as libibverbs' inline functions call them.
    unsafe {
        (*ex).wr_start.unwrap()(ex);
        (*ex).wr_id = 1;
        (*ex).wr_flags = sys::IBV_SEND_SIGNALED;
        (*ex).wr_rdma_write_imm.unwrap()(ex, 5, 0x600, 0x7000);
        (*ex).wr_set_sge.unwrap()(ex, 8, 0x900, 10);
        (*ex).wr_id = 2;
        (*ex).wr_flags = sys::IBV_SEND_INLINE;
        (*ex).wr_send_inv.unwrap()(ex, 11);
        (*ex).wr_set_inline_data.unwrap()(ex, bytes.as_ptr().cast_mut().cast(), 50);
        (*ex).wr_id = 3;
        (*ex).wr_flags = 0;
        (*ex).wr_send.unwrap()(ex);
        let list = [
            sys::ibv_data_buf { addr: bytes.as_ptr().cast_mut().cast(), length: 20 },
            sys::ibv_data_buf { addr: bytes[20..].as_ptr().cast_mut().cast(), length: 30 },
        ];
        (*ex).wr_set_inline_data_list.unwrap()(ex, 2, list.as_ptr());
        (*ex).wr_id = 4;
        (*ex).wr_atomic_fetch_add.unwrap()(ex, 12, 13, 14);
        let sges = [sge(15, 8, 16)];
        (*ex).wr_set_sge_list.unwrap()(ex, 1, sges.as_ptr());
        assert_eq!((*ex).wr_complete.unwrap()(ex), 0);
    }
    assert_eq!(bench.rung(), 1);
    let taken = bench.taken();
    let [write, inv, send, add] = &taken[..] else { panic!("{}", taken.len()) };
    assert_eq!(
        (write.0.wr_id, write.0.opcode, write.0.flags),
        (1, METAROCE_WR_RDMA_WRITE_WITH_IMM, METAROCE_SEND_SIGNALED)
    );
    assert_eq!((write.0.rkey, write.0.remote_addr, write.0.imm_data, write.0.num_sge), (5, 0x600, 0x7000, 1));
    assert_eq!((inv.0.opcode, inv.0.imm_data, inv.0.inline_len), (METAROCE_WR_SEND_WITH_INV, 11, 50));
    assert_eq!(inv.1, bytes);
    assert_eq!(
        (send.0.opcode, send.0.flags, send.0.inline_len),
        (METAROCE_WR_SEND, METAROCE_SEND_INLINE, 50)
    );
    assert_eq!(send.1, bytes);
    assert_eq!((add.0.rkey, add.0.remote_addr, add.0.compare_add, add.0.num_sge), (12, 13, 14, 1));

    // SAFETY: as above.
    unsafe {
        // Too much inline data: the batch fails, and nothing of it is posted.
        (*ex).wr_start.unwrap()(ex);
        (*ex).wr_send.unwrap()(ex);
        (*ex).wr_send.unwrap()(ex);
        (*ex).wr_set_inline_data.unwrap()(ex, bytes.as_ptr().cast_mut().cast(), 101);
        assert_eq!((*ex).wr_complete.unwrap()(ex), EINVAL);
        // More requests than slots.
        (*ex).wr_start.unwrap()(ex);
        for _ in 0..5 {
            (*ex).wr_send.unwrap()(ex);
        }
        assert_eq!((*ex).wr_complete.unwrap()(ex), ENOMEM);
        (*ex).wr_start.unwrap()(ex);
        (*ex).wr_send.unwrap()(ex);
        (*ex).wr_abort.unwrap()(ex);
        (*ex).wr_start.unwrap()(ex);
        (*ex).wr_send.unwrap()(ex);
        (*ex).wr_set_sge_list.unwrap()(ex, usize::MAX, null());
        assert_eq!((*ex).wr_complete.unwrap()(ex), EINVAL);
        (*ex).wr_start.unwrap()(ex);
        (*ex).wr_send.unwrap()(ex);
        (*ex).wr_set_inline_data_list.unwrap()(ex, usize::MAX, null());
        assert_eq!((*ex).wr_complete.unwrap()(ex), EINVAL);
        (*ex).qp_base.state = sys::IBV_QPS_INIT;
        (*ex).wr_start.unwrap()(ex);
        (*ex).wr_send.unwrap()(ex);
        assert_eq!((*ex).wr_complete.unwrap()(ex), EINVAL);
    }
    assert_eq!(bench.rung(), 0);
    assert!(bench.taken().is_empty());
}

#[test]
fn a_dead_device_fails_the_post() {
    let mut bench = Bench::new();
    bench.context.cmd_fd = -1;
    let mut wr = send_wr(sys::IBV_WR_SEND, 0, &mut []);
    let (error, bad) = bench.post(&mut wr);
    assert_ne!(error, 0);
    assert_eq!(bad, &raw mut wr);
}

#[test]
fn post_recv_checks_and_rings_only_when_asked_to() {
    let mut bench = Bench::new();
    let mut list = [sge(1, 2, 3); 3];
    // SAFETY: integers and pointers.
    let mut bad_wr: sys::ibv_recv_wr = unsafe { zero() };
    bad_wr.sg_list = list.as_mut_ptr();
    bad_wr.num_sge = 3;
    let mut wr = bad_wr;
    wr.wr_id = 5;
    wr.num_sge = 2;
    wr.next = &mut bad_wr;
    let mut bad = null_mut();
    // SAFETY: the list is valid.
    assert_eq!(unsafe { qp::post_recv(bench.qp(), &mut wr, &mut bad) }, EINVAL);
    assert_eq!(bad, &raw mut bad_wr);
    assert_eq!(bench.rq.producer().load(Ordering::Acquire), 1);
    let wqe: metaroce_recv_wqe = bench.rq.slot(0).get().unwrap();
    assert_eq!((wqe.wr_id, wqe.num_sge), (5, 2));
    wr.next = null_mut();
    for expected in [0, 0, 0, ENOMEM] {
        // SAFETY: as above.
        assert_eq!(unsafe { qp::post_recv(bench.qp(), &mut wr, &mut bad) }, expected);
    }
    bench.set_state(sys::IBV_QPS_RESET);
    // SAFETY: as above.
    assert_eq!(unsafe { qp::post_recv(bench.qp(), &mut wr, &mut bad) }, EINVAL);
    assert_eq!(bench.rung(), 0);
    // The kernel asks for one in state ERR.
    bench.set_state(sys::IBV_QPS_ERR);
    bench.rq.arm().store(1, Ordering::Relaxed);
    bench.rq.consumer().store(1, Ordering::Release);
    // SAFETY: as above.
    assert_eq!(unsafe { qp::post_recv(bench.qp(), &mut wr, &mut bad) }, ENOMEM);
    // A post that fails may ring as well.
    bench.rung();
    bench.received.store(1, Ordering::Release);
    // SAFETY: as above.
    assert_eq!(unsafe { qp::post_recv(bench.qp(), &mut wr, &mut bad) }, 0);
    assert_eq!(bench.rung(), 1);
}

fn full_cqe(wr_id: u64) -> metaroce_cqe {
    metaroce_cqe {
        wr_id,
        status: sys::IBV_WC_RNR_RETRY_EXC_ERR,
        opcode: sys::IBV_WC_RECV_RDMA_WITH_IMM,
        byte_len: 1,
        imm_data: 2,
        qpn: QPN,
        src_qpn: 4,
        wc_flags: sys::IBV_WC_WITH_IMM,
        vendor_err: 6,
        timestamp: 7,
        pkey_index: 8,
        wqe_index: 0,
        cookie: 0,
    }
}

#[test]
fn poll_cq_fills_the_array() {
    let mut bench = Bench::new();
    for id in 0..5 {
        bench.give(full_cqe(id));
    }
    // SAFETY: integers.
    let mut wc: [sys::ibv_wc; 3] = unsafe { zero() };
    // SAFETY: three elements.
    unsafe {
        assert_eq!(cq::poll_cq(bench.cq(), 3, wc.as_mut_ptr()), 3);
        assert_eq!(wc.map(|wc| wc.wr_id), [0, 1, 2]);
        assert_eq!(
            (wc[0].status, wc[0].opcode),
            (sys::IBV_WC_RNR_RETRY_EXC_ERR, sys::IBV_WC_RECV_RDMA_WITH_IMM)
        );
        assert_eq!((wc[0].byte_len, wc[0].__bindgen_anon_1.imm_data, wc[0].qp_num), (1, 2, QPN));
        assert_eq!((wc[0].src_qp, wc[0].wc_flags, wc[0].vendor_err), (4, sys::IBV_WC_WITH_IMM, 6));
        assert_eq!((wc[0].pkey_index, wc[0].slid, wc[0].sl, wc[0].dlid_path_bits), (8, 0, 0, 0));
        assert_eq!(cq::poll_cq(bench.cq(), 0, wc.as_mut_ptr()), 0);
        assert_eq!(bench.completions.consumer().load(Ordering::Relaxed), 3);
        assert_eq!(cq::poll_cq(bench.cq(), 3, wc.as_mut_ptr()), 2);
        assert_eq!(cq::poll_cq(bench.cq(), 3, wc.as_mut_ptr()), 0);
    }
}

#[test]
fn extended_polling() {
    let mut bench = Bench::new();
    // SAFETY: the functions are called as libibverbs' inline functions call them.
    unsafe {
        let ex = bench.cq().cast::<sys::ibv_cq_ex>();
        cq::set_readers(ex, u64::from(sys::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | sys::IBV_WC_EX_WITH_IMM));
        assert!((*ex).read_byte_len.is_none() && (*ex).read_cvlan.is_none());
        let mut attr = sys::ibv_poll_cq_attr { comp_mask: 0 };
        assert_eq!((*ex).start_poll.unwrap()(ex, &mut attr), ENOENT);
        bench.give(full_cqe(10));
        bench.give(metaroce_cqe { status: 0, ..full_cqe(11) });
        attr.comp_mask = 1;
        assert_eq!((*ex).start_poll.unwrap()(ex, &mut attr), EINVAL);
        attr.comp_mask = 0;
        assert_eq!((*ex).start_poll.unwrap()(ex, &mut attr), 0);
        assert_eq!(((*ex).wr_id, (*ex).status), (10, sys::IBV_WC_RNR_RETRY_EXC_ERR));
        assert_eq!((*ex).read_completion_ts.unwrap()(ex), 7);
        assert_eq!((*ex).read_imm_data.unwrap()(ex), 2);
        assert_eq!((*ex).read_wc_flags.unwrap()(ex), sys::IBV_WC_WITH_IMM);
        // Arming does not wait for the end of the poll.
        assert_eq!(cq::req_notify_cq(bench.cq(), 0), 0);
        assert_eq!((*ex).next_poll.unwrap()(ex), 0);
        assert_eq!(((*ex).wr_id, (*ex).status), (11, 0));
        assert_eq!(bench.completions.consumer().load(Ordering::Relaxed), 1);
        assert_eq!((*ex).next_poll.unwrap()(ex), ENOENT);
        (*ex).end_poll.unwrap()(ex);
        assert_eq!(bench.completions.consumer().load(Ordering::Relaxed), 2);
        // The lock is free again.
        assert_eq!((*ex).start_poll.unwrap()(ex, &mut attr), ENOENT);
    }
}

#[test]
fn arming_never_goes_back() {
    let mut bench = Bench::new();
    // SAFETY: the queue is ours.
    unsafe {
        for (solicited, level) in
            [(1, METAROCE_ARM_SOLICITED), (0, METAROCE_ARM_NEXT), (1, METAROCE_ARM_NEXT)]
        {
            assert_eq!(cq::req_notify_cq(bench.cq(), solicited), 0);
            assert_eq!(bench.completions.arm().load(Ordering::Relaxed), level);
        }
        bench.completions.arm().store(0, Ordering::Relaxed);
        cq::req_notify_cq(bench.cq(), 1);
        assert_eq!(bench.completions.arm().load(Ordering::Relaxed), METAROCE_ARM_SOLICITED);
    }
}

#[test]
fn the_list_of_the_dying() {
    let mut benches = [Bench::new(), Bench::new(), Bench::new()];
    let qps = benches.each_mut().map(|bench| bench.qp().cast::<Qp>());
    let mut dying = qp::Dying::default();
    assert!(dying.take(|_| true).is_none());
    // SAFETY: they live longer than the list.
    unsafe { qps.iter().for_each(|qp| dying.add(*qp)) };
    assert_eq!(dying.take(|qp| qp == qps[1]), Some(qps[1]));
    assert_eq!(dying.take(|qp| qp == qps[1]), None);
    assert_eq!(dying.take(|qp| qp == qps[2]), Some(qps[2]));
    assert_eq!(dying.take(|qp| qp == qps[0]), Some(qps[0]));
    assert!(dying.take(|_| true).is_none());
}

/// Which side is too old is told from the version that the module has announced in sysfs.
#[test]
fn a_mismatch_names_the_side_that_is_too_old() {
    let (low, high) = (*crate::abi::ABI_VERSIONS.start(), *crate::abi::ABI_VERSIONS.end());
    let range = format!("the plugin {low} to {high}");
    for (kernel, old, new) in [(low - 1, "kernel module", "plugin"), (high + 1, "plugin", "kernel module")] {
        // SAFETY: integers and pointers, both of them.
        let (mut sysfs, mut device): (sys::verbs_sysfs_dev, sys::verbs_device) = unsafe { (zero(), zero()) };
        sysfs.abi_ver = kernel;
        device.sysfs = &mut sysfs;
        for (to, from) in device.device.name.iter_mut().zip(b"roce7") {
            *to = *from as c_char;
        }
        let (mut told, to) = UnixStream::pair().unwrap();
        // SAFETY: the device has a name and what sysfs says of it.
        unsafe { device::explain_mismatch((&raw mut device).cast(), to.as_raw_fd()) };
        drop(to);
        let mut text = String::new();
        told.read_to_string(&mut text).unwrap();
        let line = text.strip_suffix('\n').unwrap();
        assert!(!line.contains('\n') && line.starts_with("metaroce: roce7: "), "{line}");
        let (what, remedy) = line.rsplit_once("; ").unwrap();
        assert!(what.contains(&format!("{old} is too old for ")), "{kernel}: {what}");
        assert!(!what.contains(&format!("{new} is too old")), "{kernel}: {what}");
        assert!(what.contains(&format!("up to {kernel}, {range}")), "{kernel}: {what}");
        assert_eq!(remedy, format!("upgrade the {}", old.trim_start_matches("kernel ")), "{kernel}");
    }
}
