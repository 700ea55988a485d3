/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Extensions of the metaroce device beside verbs: metarocedv(7). Link with -lmetaroce.
 *
 * Functions return 0 or a positive errno. EOPNOTSUPP: the queue pair is not one of a metaroce
 * device, or the kernel module does not know the extension.
 */
#ifndef INFINIBAND_METAROCEDV_H
#define INFINIBAND_METAROCEDV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <infiniband/verbs.h>
#include <rdma/metaroce-abi.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the device is one of metaroce. */
bool metarocedv_is_supported(struct ibv_device *device);

/*
 * What the inline functions below call: sizes are those of the structures that the program was
 * compiled with.
 */
int _metarocedv_query(struct ibv_qp *qp, struct metaroce_connection *connection,
		      size_t connection_size, struct metaroce_path *paths, size_t path_size,
		      uint32_t *count);
int _metarocedv_modify(struct ibv_qp *qp, const struct metaroce_qp_attr *attr, size_t size);
int _metarocedv_transitions(struct ibv_qp *qp, uint64_t *next, struct metaroce_transition *list,
			    size_t size, uint32_t *count);

/* The connection that the queue pair is in. */
static inline int metarocedv_query_connection(struct ibv_qp *qp,
					      struct metaroce_connection *connection)
{
	return _metarocedv_query(qp, connection, sizeof(*connection), NULL, 0, NULL);
}

/*
 * The connection and its paths, of one moment. *count: how many there is room for (at the most
 * METAROCE_MAX_PATHS are needed), then how many there are in paths.
 */
static inline int metarocedv_query_paths(struct ibv_qp *qp,
					 struct metaroce_connection *connection,
					 struct metaroce_path *paths, uint32_t *count)
{
	return _metarocedv_query(qp, connection, sizeof(*connection), paths, sizeof(*paths), count);
}

/*
 * Sets what attr->mask says. Paths, planes and controller are those of the connection that the
 * queue pair makes when it goes to RTR; one that is there already stays as it is.
 */
static inline int metarocedv_modify_qp(struct ibv_qp *qp, const struct metaroce_qp_attr *attr)
{
	return _metarocedv_modify(qp, attr, sizeof(*attr));
}

/*
 * What has become of paths, from transition *next on; *next becomes the number after the last one
 * in list. *count: how many there is room for, then how many there are in list. A first number
 * above *next says that those in between are forgotten. Afterwards the next transition raises the
 * event again.
 */
static inline int metarocedv_read_transitions(struct ibv_qp *qp, uint64_t *next,
					      struct metaroce_transition *list, uint32_t *count)
{
	return _metarocedv_transitions(qp, next, list, sizeof(*list), count);
}

#ifdef __cplusplus
}
#endif

#endif /* INFINIBAND_METAROCEDV_H */
