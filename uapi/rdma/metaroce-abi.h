/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * What the metaroce kernel module and its libibverbs provider share: the only
 * description of it. Both sides check sizes and offsets at build time.
 *
 * Rings
 * -----
 * Every queue is one mapping: a struct metaroce_ring, then the slots. Indices
 * run freely over 32 bits; slot = index & (entries - 1); entries is a power of
 * two. The owner of an index is the only one who writes it; the writer of a
 * slot stores the slot first and then its index with release semantics, the
 * reader loads the index with acquire semantics. The kernel copies a slot once
 * and checks the copy; it keeps private copies of its own indices and never
 * reads them back from the mapping.
 *
 *   queue   producer        consumer
 *   SQ      user: posted    kernel: WRs retired (completed or flushed, signaled or not)
 *   RQ      user: posted    kernel: WQEs taken
 *   SRQ     user: posted    kernel: WQEs taken
 *   CQ      kernel: CQEs    user: CQEs polled
 *
 * A slot is free when the kernel's consumer is beyond it and, for receives and
 * signaled sends, its completion has been polled: the depth of a queue bounds what
 * it can have in its CQ. The user counts what it has polled. Receives of an SRQ that
 * a QP had taken and not completed when it went to RESET or was destroyed have no
 * completion: the kernel counts them in metaroce_ring.arm of the SRQ.
 *
 * Send doorbell: the POST_SEND command of the uverbs write interface with
 * wr_count 0 and wqe_size sizeof(struct ib_uverbs_send_wr). One doorbell may
 * cover any number of WQEs. Receives need no doorbell, unless the kernel asks for
 * it: after storing the producer of an RQ (not of an SRQ) the user makes a full
 * barrier, reads metaroce_ring.arm of that RQ, and when it is not 0 rings the send
 * doorbell of the QP. The kernel sets the word in state ERR, where it flushes what
 * is posted, and then looks at the producer once more.
 *
 * CQ arming: the user raises metaroce_ring.arm to METAROCE_ARM_* (never lowers
 * it) and polls once more after it; the kernel takes the word back to 0 when it
 * raises the event. No system call is made. Each side has a full barrier between
 * its store (arm word; producer) and its load (producer; arm word).
 *
 * RESET: when modify_qp to RESET returns, the kernel has dropped what was posted:
 * consumer equals producer on SQ and RQ, and no further CQE of the QP is written.
 * The user then discards the QP's CQEs and goes on from the consumer it reads. The
 * same holds for CQEs once destroy_qp has returned. To discard them the user may
 * rewrite the CQ slots that it has not yet consumed.
 *
 * Versions: the device's uverbs_abi_ver is the kernel's highest ABI version, so
 * that a provider can say which side is too old.
 */
#ifndef METAROCE_ABI_USER_H
#define METAROCE_ABI_USER_H

#include <linux/types.h>

/* Range of ABI versions that a side speaks; see struct metaroce_alloc_ucontext_req. */
#define METAROCE_ABI_VERSION 2

/*
 * RDMA driver id reported by the device. Outside enum rdma_driver_id (a value
 * of that enum belongs to an in-tree driver): the ASCII letters "MRCE".
 */
#define METAROCE_DRIVER_ID 0x4d524345

/*
 * The mark in a node GUID (host order, under the mask), by which udev finds the
 * devices of this driver: a locally administered prefix, where others have their
 * company's.
 */
#define METAROCE_GUID_MARK 0x024d520000000000ULL
#define METAROCE_GUID_MASK 0xffffff0000000000ULL

/* "MRNG" */
#define METAROCE_RING_MAGIC 0x4d524e47

enum metaroce_ring_kind {
	METAROCE_RING_SQ = 1,
	METAROCE_RING_RQ = 2,
	METAROCE_RING_SRQ = 3,
	METAROCE_RING_CQ = 4,
};

enum metaroce_arm {
	METAROCE_ARM_NONE = 0,
	METAROCE_ARM_SOLICITED = 1,
	METAROCE_ARM_NEXT = 2,
};

/* Head of each ring; written by the kernel at creation. Each index has its cache line. */
struct metaroce_ring {
	__u32 magic;		/* METAROCE_RING_MAGIC */
	__u32 kind;		/* enum metaroce_ring_kind */
	__u32 entries;		/* slots, a power of two */
	__u32 stride;		/* bytes from slot to slot */
	__u32 slots_offset;	/* bytes from here to slot 0 */
	__u32 reserved0[11];
	__u32 producer;
	__u32 reserved1[15];
	__u32 consumer;
	__u32 reserved2[15];
	/* CQ: enum metaroce_arm; RQ: not 0: receives need a doorbell; SRQ: lost receives */
	__u32 arm;
	__u32 reserved3[15];
};

/* Where a ring is mapped from: mmap(size, PROT_READ | PROT_WRITE, MAP_SHARED, cmd_fd, offset). */
struct metaroce_mmap {
	__aligned_u64 offset;	/* bytes; 0 with size 0 means: no such ring */
	__aligned_u64 size;	/* bytes */
};

/* Commands: alloc_ucontext. */
struct metaroce_alloc_ucontext_req {
	__u32 abi_min;		/* lowest ABI version the provider speaks */
	__u32 abi_max;		/* highest one */
	__aligned_u64 reserved;	/* 0 */
};

struct metaroce_alloc_ucontext_resp {
	__u32 abi_version;	/* chosen by the kernel; EPROTO when ranges do not meet */
	__u32 max_inline;	/* bytes */
	__u32 max_sge;
	__u32 reserved;
};

struct metaroce_create_cq_resp {
	struct metaroce_mmap ring;
	__u32 entries;		/* usable CQEs; at least what was asked for */
	__u32 cqn;
};

/* resize_cq: CQEs not yet polled and the arm word are moved to the new ring by the kernel. */
struct metaroce_resize_cq_resp {
	struct metaroce_mmap ring;
	__u32 entries;
	__u32 reserved;
};

struct metaroce_create_qp_req {
	__aligned_u64 cookie;	/* comes back in the completions; 0 is none */
};

struct metaroce_create_qp_resp {
	struct metaroce_mmap sq;
	struct metaroce_mmap rq;	/* size 0 with an SRQ */
	__u32 qpn;
	__u32 max_inline;		/* bytes that a send WQE can carry */
};

struct metaroce_create_srq_resp {
	struct metaroce_mmap ring;
	__u32 srqn;
	__u32 reserved;
};

/* enum metaroce_send_opcode has the values of enum ib_uverbs_wr_opcode. */
enum metaroce_send_opcode {
	METAROCE_WR_RDMA_WRITE = 0,
	METAROCE_WR_RDMA_WRITE_WITH_IMM = 1,
	METAROCE_WR_SEND = 2,
	METAROCE_WR_SEND_WITH_IMM = 3,
	METAROCE_WR_RDMA_READ = 4,
	METAROCE_WR_ATOMIC_CMP_AND_SWP = 5,
	METAROCE_WR_ATOMIC_FETCH_AND_ADD = 6,
	METAROCE_WR_LOCAL_INV = 7,
	METAROCE_WR_BIND_MW = 8,
	METAROCE_WR_SEND_WITH_INV = 9,
};

/* The values of enum ibv_send_flags. */
enum metaroce_send_flags {
	METAROCE_SEND_FENCE = 1 << 0,
	METAROCE_SEND_SIGNALED = 1 << 1,
	METAROCE_SEND_SOLICITED = 1 << 2,
	METAROCE_SEND_INLINE = 1 << 3,
};

struct metaroce_sge {
	__aligned_u64 addr;
	__u32 length;
	__u32 lkey;
};

/* Slot of an SQ; num_sge struct metaroce_sge or, with INLINE, inline_len bytes follow. */
struct metaroce_send_wqe {
	__aligned_u64 wr_id;
	__u32 opcode;		/* enum metaroce_send_opcode */
	__u32 flags;		/* enum metaroce_send_flags */
	__aligned_u64 remote_addr;
	__u32 rkey;
	__be32 imm_data;	/* or the rkey to invalidate, in host order */
	__aligned_u64 compare_add;
	__aligned_u64 swap;
	__u32 num_sge;		/* 0 with INLINE */
	__u32 inline_len;	/* bytes; 0 without INLINE */
	__u32 reserved[2];	/* 0 */
};

/* Slot of an RQ or SRQ; num_sge struct metaroce_sge follow. */
struct metaroce_recv_wqe {
	__aligned_u64 wr_id;
	__u32 num_sge;
	__u32 reserved;		/* 0 */
};

/* Slot of a CQ. status, opcode and wc_flags have the values of libibverbs. */
struct metaroce_cqe {
	__aligned_u64 wr_id;
	__u32 status;		/* enum ibv_wc_status */
	__u32 opcode;		/* enum ibv_wc_opcode */
	__u32 byte_len;
	__be32 imm_data;	/* or the invalidated rkey, in host order */
	__u32 qpn;
	__u32 src_qpn;
	__u32 wc_flags;		/* enum ibv_wc_flags */
	__u32 vendor_err;
	__aligned_u64 timestamp;	/* ns, CLOCK_MONOTONIC, when the CQE was written */
	__u32 pkey_index;
	__u32 wqe_index;	/* send queue: index in the ring of the WQE */
	__aligned_u64 cookie;	/* metaroce_create_qp_req.cookie */
};

#endif /* METAROCE_ABI_USER_H */
