// SPDX-License-Identifier: GPL-2.0
/*
 * mroce-dv-c [DEVICE [GID-INDEX]]: a C program as users write it: <infiniband/metarocedv.h> as it
 * is installed, linked with -lmetaroce. It compiles as C++, too. What the extensions promise is for
 * mroce-dv to test; here it is that a C compiler, a linker and the loader take them.
 *
 * Two queue pairs of this process talk to each other over the device (RDMA_DEV and GID4 of the test
 * machines without arguments). KTAP; status 0, or 1 when something failed.
 */
#define _POSIX_C_SOURCE 200809L /* clock_gettime with -std=c11 */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <infiniband/metarocedv.h>

#define MESSAGE 65536u /* bytes of a Write */
#define MESSAGES 64u
#define PATIENCE 20 /* seconds for a completion */

struct side {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static union ibv_gid gid;
static int gid_index;
static struct side sides[2];
static int number, failed;

static void result(bool ok, const char *name, const char *format, ...)
{
	va_list args;

	if (!ok) {
		printf("# ");
		va_start(args, format);
		vprintf(format, args);
		va_end(args);
		printf("\n");
		failed++;
	}
	printf("%sok %d %s\n", ok ? "" : "not ", ++number, name);
}

static int give_up(const char *what, int error)
{
	printf("Bail out! %s: %s\n", what, strerror(error));
	return 1;
}

/* A queue pair in INIT, with a CQ of its own; an errno. */
static int make(struct side *side)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	side->cq = ibv_create_cq(context, MESSAGES, NULL, NULL, 0);
	if (!side->cq)
		return errno;
	memset(&init, 0, sizeof(init));
	init.send_cq = side->cq;
	init.recv_cq = side->cq;
	init.cap.max_send_wr = MESSAGES;
	init.cap.max_send_sge = 1;
	init.qp_type = IBV_QPT_RC;
	side->qp = ibv_create_qp(pd, &init);
	if (!side->qp)
		return errno;
	memset(&attr, 0, sizeof(attr));
	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = 1;
	attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
	return ibv_modify_qp(side->qp, &attr,
			     IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

/* Up to RTS, with the other one as its peer; an errno. */
static int connect_to(struct side *side, const struct side *peer)
{
	struct ibv_qp_attr attr;
	int error;

	memset(&attr, 0, sizeof(attr));
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_1024;
	attr.dest_qp_num = peer->qp->qp_num;
	attr.min_rnr_timer = 12;
	attr.ah_attr.is_global = 1;
	attr.ah_attr.grh.dgid = gid;
	attr.ah_attr.grh.sgid_index = (uint8_t)gid_index;
	attr.ah_attr.grh.hop_limit = 64;
	attr.ah_attr.port_num = 1;
	error = ibv_modify_qp(side->qp, &attr,
			      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			      IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (error)
		return error;
	memset(&attr, 0, sizeof(attr));
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 18;
	attr.retry_cnt = 7;
	attr.rnr_retry = 7;
	return ibv_modify_qp(side->qp, &attr,
			     IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			     IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

/* Writes from the first half of the memory to the second, all of them posted at once; an errno. */
static int write_all(struct side *side)
{
	struct ibv_send_wr wr, *bad;
	struct ibv_sge sge;
	struct timespec begun, now;
	struct ibv_wc wc;
	unsigned int i;
	int error, got;

	sge.addr = (uintptr_t)mr->addr;
	sge.length = MESSAGE;
	sge.lkey = mr->lkey;
	memset(&wr, 0, sizeof(wr));
	wr.sg_list = &sge;
	wr.num_sge = 1;
	wr.opcode = IBV_WR_RDMA_WRITE;
	wr.send_flags = IBV_SEND_SIGNALED;
	wr.wr.rdma.remote_addr = (uintptr_t)mr->addr + MESSAGE;
	wr.wr.rdma.rkey = mr->rkey;
	for (i = 0; i < MESSAGES; i++) {
		wr.wr_id = i;
		error = ibv_post_send(side->qp, &wr, &bad);
		if (error)
			return error;
	}
	for (i = 0; i < MESSAGES; i++) {
		clock_gettime(CLOCK_MONOTONIC, &begun);
		do {
			got = ibv_poll_cq(side->cq, 1, &wc);
			clock_gettime(CLOCK_MONOTONIC, &now);
		} while (!got && now.tv_sec - begun.tv_sec < PATIENCE);
		if (!got)
			return ETIMEDOUT;
		if (got < 0 || wc.status != IBV_WC_SUCCESS || wc.wr_id != i) {
			printf("# Write %u: %s\n", i,
			       got < 0 ? "no poll" : ibv_wc_status_str(wc.status));
			return EIO;
		}
	}
	return 0;
}

/* Whether this process may do what only administrators may. */
static bool is_net_admin(void)
{
	unsigned long long effective = 0;
	char line[256];
	FILE *status = fopen("/proc/self/status", "r");

	if (!status)
		return false;
	while (fgets(line, sizeof(line), status))
		if (sscanf(line, "CapEff: %llx", &effective) == 1)
			break;
	fclose(status);
	return effective >> 12 & 1; /* CAP_NET_ADMIN */
}

/* What is shown of a queue pair that has no connection. */
static void before(void)
{
	struct metaroce_connection connection;
	struct metaroce_path paths[1];
	uint32_t count = 1;
	int error;

	memset(&connection, 0xff, sizeof(connection));
	error = metarocedv_query_paths(sides[0].qp, &connection, paths, &count);
	result(!error && !connection.number && connection.state == METAROCE_CONNECTION_NONE &&
	       !count,
	       "no_connection", "%s, number %" PRIu64 ", state %u, %u paths", strerror(error),
	       (uint64_t)connection.number, connection.state, count);
}

static void modify(void)
{
	struct metaroce_qp_attr attr;
	struct metaroce_connection connection;
	int error;

	memset(&attr, 0, sizeof(attr));
	attr.mask = METAROCE_QP_PATHS | METAROCE_QP_ORDERING | METAROCE_QP_PLANES |
		    METAROCE_QP_CONTROLLER;
	attr.paths = 8;
	attr.ordering = METAROCE_ORDERING_RELAXED;
	attr.planes = 1u << 0;
	attr.controller = METAROCE_CONTROLLER_AIMD;
	error = metarocedv_modify_qp(sides[0].qp, &attr);
	if (!error)
		error = metarocedv_query_connection(sides[0].qp, &connection);
	result(!error && connection.wanted_paths == 8 &&
	       connection.ordering == METAROCE_ORDERING_RELAXED &&
	       connection.wanted_planes == 1 &&
	       connection.wanted_controller == METAROCE_CONTROLLER_AIMD,
	       "modify", "%s", strerror(error));
	attr.mask = ~0u;
	error = metarocedv_modify_qp(sides[0].qp, &attr);
	result(error == EINVAL, "unknown_mask_is_refused", "%s", strerror(error));
	/* Windows that take no notice of congestion are for administrators. */
	attr.mask = METAROCE_QP_CONTROLLER;
	attr.controller = METAROCE_CONTROLLER_FIXED;
	error = metarocedv_modify_qp(sides[1].qp, &attr);
	result(error == (is_net_admin() ? 0 : EPERM), "fixed_windows_for_administrators",
	       "%s", strerror(error));
}

/* The figures of the paths after all the Writes. */
static void telemetry(void)
{
	struct metaroce_connection connection;
	struct metaroce_path paths[METAROCE_MAX_PATHS];
	struct metaroce_transition list[METAROCE_MAX_TRANSITIONS];
	uint32_t count = METAROCE_MAX_PATHS, i, wrong = 0, transitions = METAROCE_MAX_TRANSITIONS;
	uint64_t bytes = 0, next = 0;
	int error;

	error = metarocedv_query_paths(sides[0].qp, &connection, paths, &count);
	result(!error && connection.number && connection.state == METAROCE_CONNECTION_UP &&
	       !memcmp(connection.local_gid, gid.raw, 16) &&
	       !memcmp(connection.remote_gid, gid.raw, 16) && connection.qps == 2 &&
	       connection.paths == 8 && count == 8 && connection.planes == 1 &&
	       connection.controller == METAROCE_CONTROLLER_AIMD,
	       "connection",
	       "%s, state %u, %u queue pairs, %u paths, %u told, planes %#x, controller %u",
	       strerror(error), connection.state, connection.qps, connection.paths, count,
	       connection.planes, connection.controller);
	if (error)
		count = 0;
	for (i = 0; i < count; i++) {
		printf("# path %u, port %u: %llu packets, %llu sent again, round trip %llu us\n",
		       paths[i].path, paths[i].port, (unsigned long long)paths[i].packets,
		       (unsigned long long)paths[i].resent,
		       (unsigned long long)paths[i].srtt / 1000);
		bytes += paths[i].bytes;
		if (paths[i].path != i || !paths[i].port || paths[i].port > 65535 ||
		    paths[i].state > METAROCE_PATH_FAILED || !paths[i].packets)
			wrong++;
	}
	result(count && !wrong && bytes >= (uint64_t)MESSAGES * MESSAGE, "paths",
	       "%u of %u paths make no sense, %" PRIu64 " bytes", wrong, count, bytes);
	error = metarocedv_read_transitions(sides[0].qp, &next, list, &transitions);
	result(!error && next == connection.next_transition &&
	       transitions <= METAROCE_MAX_TRANSITIONS,
	       "transitions", "%s, next is %" PRIu64, strerror(error), next);
}

int main(int argc, char **argv)
{
	const char *name = argc > 1 ? argv[1] : getenv("RDMA_DEV");
	const char *index = argc > 2 ? argv[2] : getenv("GID4");
	struct ibv_device **list = ibv_get_device_list(NULL), **device;
	char *memory;
	int error;

	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("KTAP version 1\n1..9\n");
	if (!list)
		return give_up("no list of devices", errno);
	for (device = list; *device && name && strcmp(ibv_get_device_name(*device), name); device++)
		;
	if (!*device)
		return give_up(name ? name : "no device", ENODEV);
	result(metarocedv_is_supported(*device), "supported", "%s is none of metaroce",
	       ibv_get_device_name(*device));
	context = ibv_open_device(*device);
	if (!context)
		return give_up("ibv_open_device", errno);
	gid_index = index ? atoi(index) : 0;
	if (ibv_query_gid(context, 1, gid_index, &gid))
		return give_up("ibv_query_gid", errno);
	pd = ibv_alloc_pd(context);
	memory = (char *)calloc(2, MESSAGE);
	if (pd && memory)
		mr = ibv_reg_mr(pd, memory, 2 * MESSAGE,
				IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	if (!mr)
		return give_up("ibv_reg_mr", errno);
	memset(memory, 0x5a, MESSAGE);
	error = make(&sides[0]);
	if (!error)
		error = make(&sides[1]);
	if (error)
		return give_up("queue pairs", error);
	before();
	modify();
	error = connect_to(&sides[0], &sides[1]);
	if (!error)
		error = connect_to(&sides[1], &sides[0]);
	if (!error)
		error = write_all(&sides[0]);
	result(!error && !memcmp(memory, memory + MESSAGE, MESSAGE), "writes", "%s",
	       strerror(error));
	telemetry();
	printf("# totals: pass:%d fail:%d skip:0\n", number - failed, failed);
	ibv_destroy_qp(sides[0].qp);
	ibv_destroy_qp(sides[1].qp);
	ibv_destroy_cq(sides[0].cq);
	ibv_destroy_cq(sides[1].cq);
	ibv_dereg_mr(mr);
	ibv_dealloc_pd(pd);
	ibv_close_device(context);
	ibv_free_device_list(list);
	free(memory);
	return failed != 0;
}
