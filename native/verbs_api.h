/* libibverbs, as far as a link uses it. It is opened at run time, so neither its headers nor the
 * library are needed to build this, or to run it where there is no RDMA. What is declared here is
 * the part of its binary interface (IBVERBS_1.1) that has been the same since 2006;
 * tests/native/verbs_layout.c compares each field with the library's own header. */
#ifndef LC_VERBS_API_H
#define LC_VERBS_API_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum {
    VB_GRH_BYTES = 40, /* before each datagram that a queue pair of datagrams receives */
    VB_QPT_UD = 4,
    VB_WR_SEND = 2,
    VB_SEND_SIGNALED = 1 << 1,
    VB_SEND_INLINE = 1 << 3,
    VB_WC_GRH = 1 << 0,
    VB_WC_SUCCESS = 0,
    VB_ACCESS_LOCAL_WRITE = 1,
    VB_PORT_ACTIVE = 4,
    VB_LINK_ETHERNET = 2,
    VB_MTU_4096 = 5 /* 256 is 1 */
};

enum { VB_QPS_RESET = 0, VB_QPS_INIT = 1, VB_QPS_RTR = 2, VB_QPS_RTS = 3 };

enum {
    VB_QP_STATE = 1 << 0,
    VB_QP_PKEY_INDEX = 1 << 4,
    VB_QP_PORT = 1 << 5,
    VB_QP_QKEY = 1 << 6,
    VB_QP_SQ_PSN = 1 << 16
};

/* Asynchronous events. */
enum {
    VB_EVENT_CQ_ERR = 0,
    VB_EVENT_QP_FATAL = 1,
    VB_EVENT_QP_REQ_ERR = 2,
    VB_EVENT_QP_ACCESS_ERR = 3,
    VB_EVENT_DEVICE_FATAL = 8,
    VB_EVENT_PORT_ACTIVE = 9,
    VB_EVENT_PORT_ERR = 10
};

typedef struct vb_device vb_device;
typedef struct vb_pd vb_pd;
typedef struct vb_ah vb_ah;
typedef struct vb_cq vb_cq;
typedef struct vb_qp vb_qp;

typedef union {
    uint8_t raw[16];
    uint64_t words[2];
} vb_gid;

typedef struct {
    uint64_t addr;
    uint32_t length;
    uint32_t lkey;
} vb_sge;

typedef struct vb_recv_wr {
    uint64_t wr_id;
    struct vb_recv_wr *next;
    vb_sge *sg_list;
    int num_sge;
} vb_recv_wr;

typedef struct vb_send_wr {
    uint64_t wr_id;
    struct vb_send_wr *next;
    vb_sge *sg_list;
    int num_sge;
    int opcode;
    unsigned send_flags;
    uint32_t unused;
    vb_ah *ah;
    uint32_t remote_qpn;
    uint32_t remote_qkey;
    uint64_t others[10]; /* of other kinds of requests */
} vb_send_wr;

typedef struct {
    uint64_t wr_id;
    int status;
    int opcode;
    uint32_t vendor_err;
    uint32_t byte_len;
    uint32_t unused;
    uint32_t qp_num;
    uint32_t src_qp;
    unsigned wc_flags;
    uint16_t pkey_index;
    uint16_t slid;
    uint8_t sl;
    uint8_t dlid_path_bits;
} vb_wc;

typedef struct {
    vb_device *device;
    void *unused1[11];
    int (*poll_cq)(vb_cq *cq, int max, vb_wc *found);
    int (*req_notify_cq)(vb_cq *cq, int solicited_only);
    void *unused2[12];
    int (*post_send)(vb_qp *qp, vb_send_wr *first, vb_send_wr **bad);
    int (*post_recv)(vb_qp *qp, vb_recv_wr *first, vb_recv_wr **bad);
    void *unused3[5];
    int cmd_fd;
    int async_fd;
} vb_context;

typedef struct {
    vb_context *context;
    int fd;
} vb_channel;

typedef struct {
    vb_context *context;
    vb_pd *pd;
    void *addr;
    size_t length;
    uint32_t handle;
    uint32_t lkey;
} vb_mr;

/* As far as is read. */
typedef struct {
    vb_context *context;
    void *unused[5];
    uint32_t handle;
    uint32_t qp_num;
} vb_qp_head;

typedef struct {
    uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
} vb_qp_cap;

typedef struct {
    void *qp_context;
    vb_cq *send_cq, *recv_cq;
    void *srq;
    vb_qp_cap cap;
    int qp_type;
    int sq_sig_all;
} vb_qp_init_attr;

typedef struct {
    vb_gid dgid;
    uint32_t flow_label;
    uint8_t sgid_index, hop_limit, traffic_class;
} vb_global_route;

typedef struct {
    vb_global_route grh;
    uint16_t dlid;
    uint8_t sl, src_path_bits, static_rate, is_global, port_num;
} vb_ah_attr;

typedef struct {
    int qp_state, cur_qp_state, path_mtu, path_mig_state;
    uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
    unsigned qp_access_flags;
    vb_qp_cap cap;
    vb_ah_attr ah_attr, alt_ah_attr;
    uint16_t pkey_index, alt_pkey_index;
    uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer;
    uint8_t port_num, timeout, tries, tries_unready, alt_port_num, alt_timeout;
    uint32_t rate_limit;
} vb_qp_attr;

typedef struct {
    int state, max_mtu, active_mtu, gid_tbl_len;
    uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
    uint16_t pkey_tbl_len, lid, sm_lid;
    uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply;
    uint8_t active_width, active_speed, phys_state, link_layer;
    uint8_t others[64]; /* that newer libraries write */
} vb_port_attr;

typedef struct {
    union {
        void *object;
        int port;
    } element;
    int event_type;
} vb_async_event;

typedef struct {
    vb_device **(*get_device_list)(int *n);
    void (*free_device_list)(vb_device **list);
    const char *(*get_device_name)(vb_device *device);
    vb_context *(*open_device)(vb_device *device);
    int (*close_device)(vb_context *context);
    int (*query_port)(vb_context *context, uint8_t port, vb_port_attr *attr);
    int (*query_gid)(vb_context *context, uint8_t port, int index, vb_gid *gid);
    int (*query_pkey)(vb_context *context, uint8_t port, int index, uint16_t *key);
    vb_pd *(*alloc_pd)(vb_context *context);
    int (*dealloc_pd)(vb_pd *pd);
    vb_mr *(*reg_mr)(vb_pd *pd, void *addr, size_t bytes, int access);
    int (*dereg_mr)(vb_mr *mr);
    vb_channel *(*create_comp_channel)(vb_context *context);
    int (*destroy_comp_channel)(vb_channel *channel);
    vb_cq *(*create_cq)(vb_context *context, int entries, void *own, vb_channel *channel,
                        int vector);
    int (*destroy_cq)(vb_cq *cq);
    int (*get_cq_event)(vb_channel *channel, vb_cq **cq, void **own);
    void (*ack_cq_events)(vb_cq *cq, unsigned n);
    vb_qp *(*create_qp)(vb_pd *pd, vb_qp_init_attr *attr);
    int (*modify_qp)(vb_qp *qp, vb_qp_attr *attr, int mask);
    int (*destroy_qp)(vb_qp *qp);
    vb_ah *(*create_ah)(vb_pd *pd, vb_ah_attr *attr);
    int (*destroy_ah)(vb_ah *ah);
    int (*get_async_event)(vb_context *context, vb_async_event *event);
    void (*ack_async_event)(vb_async_event *event);
} vb_api;

/* The functions of a library: NULL is the system's libibverbs. It stays open. NULL if it isn't
 * there, or lacks one of them. From any thread. */
const vb_api *lc_verbs_api(const char *library);

#endif
