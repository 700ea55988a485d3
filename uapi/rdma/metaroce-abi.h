/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * What the metaroce kernel module and its libibverbs provider share: the only
 * description of it. Both sides check sizes and offsets against layout.rs when they
 * are built; it says what a change here asks for.
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

/*
 * Extensions: what libmetaroce offers beside verbs (infiniband/metarocedv.h)
 * ---------------------------------------------------------------------------
 * Methods of the uverbs object METAROCE_OBJECT_QP, by ioctl. Each names a QP of
 * the caller; what it says is about the connection that this QP is in. Structures
 * grow at their end: both sides give the size they know, what the other does not
 * know is cut off or 0. Numbers of arrays are bounded by METAROCE_MAX_*.
 */

/* The driver's part of the numbers of objects, methods and attributes. */
#define METAROCE_ID(n) (0x1000 + (n))

enum metaroce_objects {
	METAROCE_OBJECT_QP = METAROCE_ID(0),
};

enum metaroce_methods {
	METAROCE_METHOD_QUERY = METAROCE_ID(0),
	METAROCE_METHOD_MODIFY = METAROCE_ID(1),
	METAROCE_METHOD_TRANSITIONS = METAROCE_ID(2),
};

/* An array's elements are as long as the program says (..._SIZE). */
enum metaroce_query_attrs {
	METAROCE_QUERY_QP = METAROCE_ID(0),		/* in: handle */
	METAROCE_QUERY_CONNECTION = METAROCE_ID(1),	/* out: struct metaroce_connection */
	METAROCE_QUERY_PATH_SIZE = METAROCE_ID(2),	/* in, with PATHS: __u32, bytes of one */
	METAROCE_QUERY_PATHS = METAROCE_ID(3),		/* out, optional: struct metaroce_path[] */
};

enum metaroce_modify_attrs {
	METAROCE_MODIFY_QP = METAROCE_ID(0),		/* in: handle */
	METAROCE_MODIFY_ATTR = METAROCE_ID(1),		/* in: struct metaroce_qp_attr */
};

enum metaroce_transitions_attrs {
	METAROCE_TRANSITIONS_QP = METAROCE_ID(0),	/* in: handle */
	METAROCE_TRANSITIONS_FROM = METAROCE_ID(1),	/* in: __u64, first number wanted */
	METAROCE_TRANSITIONS_SIZE = METAROCE_ID(2),	/* in: __u32, bytes of one */
	METAROCE_TRANSITIONS_LIST = METAROCE_ID(3),	/* out: struct metaroce_transition[] */
	METAROCE_TRANSITIONS_COUNT = METAROCE_ID(4),	/* out: __u32, how many were copied */
};

#define METAROCE_MAX_PATHS 64
/* Planes of a device. */
#define METAROCE_MAX_PLANES 8
/* Transitions that a connection remembers. */
#define METAROCE_MAX_TRANSITIONS 64
/* QPs of a connection that listen at the most. */
#define METAROCE_MAX_LISTENERS 64
/* Bytes of one element of an array at the most. */
#define METAROCE_MAX_STRIDE 512

enum metaroce_connection_state {
	METAROCE_CONNECTION_NONE = 0,	/* the QP is in RESET or INIT */
	METAROCE_CONNECTION_CONNECTING = 1,
	METAROCE_CONNECTION_UP = 2,
	METAROCE_CONNECTION_CLOSING = 3,
	METAROCE_CONNECTION_CLOSED = 4,
	METAROCE_CONNECTION_FAILED = 5,
};

enum metaroce_ordering {
	/* The last packet of a Write is copied when all before it is in place. */
	METAROCE_ORDERING_STRICT = 0,
	/* As for memory registered with IBV_ACCESS_RELAXED_ORDERING, whatever it says. */
	METAROCE_ORDERING_RELAXED = 1,
};

/* What the windows of a connection's paths do. */
enum metaroce_controller {
	METAROCE_CONTROLLER_DEFAULT = 0,	/* as the device has it */
	METAROCE_CONTROLLER_AIMD = 1,		/* additive increase, multiplicative decrease */
	METAROCE_CONTROLLER_FIXED = 2,		/* never change */
};

/* Sums are those of the connection since it was made, of all its QPs. */
struct metaroce_connection {
	__aligned_u64 number;		/* names it in the device; 0: there is none */
	__aligned_u64 now;		/* ns, CLOCK_MONOTONIC */
	__aligned_u64 next_transition;	/* number of the transition that comes next */
	__u8 local_gid[16];
	__u8 remote_gid[16];
	__u32 state;			/* enum metaroce_connection_state */
	__u32 dscp;
	__u32 paths;			/* agreed on; 0 while it is not up */
	__u32 paths_good;
	__u32 qps;
	__u32 payload_mtu;		/* bytes of a full packet */
	__aligned_u64 window;		/* bytes, of good paths */
	__aligned_u64 inflight;		/* bytes */
	__aligned_u64 share;		/* kbit/s that the peer grants; 0: no limit */
	__aligned_u64 sent_packets;	/* for the first time */
	__aligned_u64 sent_bytes;
	__aligned_u64 rcvd_packets;
	__aligned_u64 rcvd_bytes;
	__aligned_u64 resent_packets;
	__aligned_u64 spurious;		/* of these, those that were unnecessary */
	__aligned_u64 moved_packets;	/* to another path */
	__aligned_u64 ce_rcvd;		/* received with the mark CE */
	__aligned_u64 ce_echoed;	/* own packets that the peer received with it */
	__aligned_u64 window_cuts;
	/* Of this QP: what METAROCE_METHOD_MODIFY has set. */
	__u32 wanted_paths;		/* 0: as the device has it */
	__u32 ordering;			/* enum metaroce_ordering */
	__u32 events;			/* 1: it listens */
	__u32 reserved;
	/* Of the connection: as the QP that made it wanted. */
	__u32 planes;			/* a bit for each plane of this device; 0: all */
	__u32 controller;		/* enum metaroce_controller; 0: there is no connection */
	/* Of this QP: what METAROCE_METHOD_MODIFY has set. */
	__u32 wanted_planes;
	__u32 wanted_controller;	/* enum metaroce_controller */
};

enum metaroce_path_state {
	METAROCE_PATH_GOOD = 0,
	METAROCE_PATH_SUSPECT = 1,	/* silent while others are not: its packets move */
	METAROCE_PATH_FAILED = 2,	/* left: another port, probed */
};

struct metaroce_path {
	__u32 path;
	__u32 plane;			/* of this device: metaroce(7) */
	__u32 state;			/* enum metaroce_path_state */
	__u32 port;			/* UDP source port */
	__u32 epoch;
	__u32 failures;			/* times it was left */
	__u32 window;			/* bytes */
	__u32 inflight;			/* bytes */
	__aligned_u64 srtt;		/* ns, smoothed; 0: unknown */
	__aligned_u64 min_rtt;		/* ns, of the last seconds; 0: unknown */
	__aligned_u64 packets;		/* sent for the first time */
	__aligned_u64 bytes;		/* of these */
	__aligned_u64 resent;		/* over it, after they were lost on it */
	__aligned_u64 moved;		/* sent again over another path, since it was silent */
	__aligned_u64 ce;		/* own packets that the peer received with the mark CE */
	__aligned_u64 received;		/* packets received over it */
	__u32 threshold;		/* packets of reordering that are no loss */
	__u32 peer_plane;		/* of the peer's device, as the peer numbers them */
};

/* A path has changed its state, its port or its plane. */
struct metaroce_transition {
	__aligned_u64 number;		/* from 0, without gaps; lower ones may be forgotten */
	__aligned_u64 time;		/* ns, CLOCK_MONOTONIC */
	__u32 path;
	__u32 plane;			/* of this device, from now on */
	__u32 from_state;		/* enum metaroce_path_state */
	__u32 to_state;
	__u32 from_port;
	__u32 to_port;
};

enum metaroce_qp_attr_mask {
	METAROCE_QP_PATHS = 1 << 0,	/* before RTR: EISCONN later */
	METAROCE_QP_ORDERING = 1 << 1,
	METAROCE_QP_EVENTS = 1 << 2,	/* from RTR on: ENOTCONN before; ends with RESET */
	METAROCE_QP_PLANES = 1 << 3,	/* before RTR: EISCONN later */
	METAROCE_QP_CONTROLLER = 1 << 4,	/* before RTR: EISCONN later */
};

struct metaroce_qp_attr {
	__u32 mask;			/* enum metaroce_qp_attr_mask: what is set */
	/*
	 * Paths of the connection that this QP makes, 1 to METAROCE_MAX_PATHS (the peer may
	 * want fewer), 0: as the device has it. A connection that is there already stays.
	 */
	__u32 paths;
	__u32 ordering;			/* enum metaroce_ordering, of Writes to this QP */
	/*
	 * 1: IBV_EVENT_PATH_MIG is raised at the next transition, and then not before
	 * transitions were read (METAROCE_METHOD_TRANSITIONS) with this QP. ENOSPC: there are
	 * METAROCE_MAX_LISTENERS. 0: no more.
	 */
	__u32 events;
	/*
	 * Planes of this device over which the connection that this QP makes sends: bit i is
	 * plane i of METAROCE_MAX_PLANES (EINVAL for others), 0: all. While none of those named
	 * is usable, it sends over all.
	 */
	__u32 planes;
	/*
	 * Controller of the connection that this QP makes, enum metaroce_controller. EPERM:
	 * FIXED, by a program without CAP_NET_ADMIN, on a device that has another one.
	 */
	__u32 controller;
};

#endif /* METAROCE_ABI_USER_H */
