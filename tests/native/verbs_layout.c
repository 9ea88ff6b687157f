/* The library's own header against ours: compiled, never run. */
#include <infiniband/verbs.h>

#include "verbs_api.h"

#define SAME(ours, field, theirs, theirs_field)                                                    \
    _Static_assert(offsetof(ours, field) == offsetof(struct theirs, theirs_field) &&               \
                       sizeof(((ours *)0)->field) == sizeof(((struct theirs *)0)->theirs_field),   \
                   #theirs "." #theirs_field)
#define EQUAL(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs)

SAME(vb_sge, addr, ibv_sge, addr);
SAME(vb_sge, length, ibv_sge, length);
SAME(vb_sge, lkey, ibv_sge, lkey);
_Static_assert(sizeof(vb_sge) == sizeof(struct ibv_sge), "lists of them are alike");

SAME(vb_recv_wr, wr_id, ibv_recv_wr, wr_id);
SAME(vb_recv_wr, next, ibv_recv_wr, next);
SAME(vb_recv_wr, sg_list, ibv_recv_wr, sg_list);
SAME(vb_recv_wr, num_sge, ibv_recv_wr, num_sge);

SAME(vb_send_wr, wr_id, ibv_send_wr, wr_id);
SAME(vb_send_wr, next, ibv_send_wr, next);
SAME(vb_send_wr, sg_list, ibv_send_wr, sg_list);
SAME(vb_send_wr, num_sge, ibv_send_wr, num_sge);
SAME(vb_send_wr, opcode, ibv_send_wr, opcode);
SAME(vb_send_wr, send_flags, ibv_send_wr, send_flags);
SAME(vb_send_wr, ah, ibv_send_wr, wr.ud.ah);
SAME(vb_send_wr, remote_qpn, ibv_send_wr, wr.ud.remote_qpn);
SAME(vb_send_wr, remote_qkey, ibv_send_wr, wr.ud.remote_qkey);
_Static_assert(sizeof(vb_send_wr) >= sizeof(struct ibv_send_wr), "none is read beyond its end");

SAME(vb_wc, wr_id, ibv_wc, wr_id);
SAME(vb_wc, status, ibv_wc, status);
SAME(vb_wc, byte_len, ibv_wc, byte_len);
SAME(vb_wc, qp_num, ibv_wc, qp_num);
SAME(vb_wc, src_qp, ibv_wc, src_qp);
SAME(vb_wc, wc_flags, ibv_wc, wc_flags);
SAME(vb_wc, slid, ibv_wc, slid);
_Static_assert(sizeof(vb_wc) == sizeof(struct ibv_wc), "lists of them are alike");

SAME(vb_context, device, ibv_context, device);
SAME(vb_context, poll_cq, ibv_context, ops.poll_cq);
SAME(vb_context, req_notify_cq, ibv_context, ops.req_notify_cq);
SAME(vb_context, post_send, ibv_context, ops.post_send);
SAME(vb_context, post_recv, ibv_context, ops.post_recv);
SAME(vb_context, async_fd, ibv_context, async_fd);

SAME(vb_channel, context, ibv_comp_channel, context);
SAME(vb_channel, fd, ibv_comp_channel, fd);
SAME(vb_mr, lkey, ibv_mr, lkey);
SAME(vb_qp_head, context, ibv_qp, context);
SAME(vb_qp_head, qp_num, ibv_qp, qp_num);

SAME(vb_qp_init_attr, send_cq, ibv_qp_init_attr, send_cq);
SAME(vb_qp_init_attr, recv_cq, ibv_qp_init_attr, recv_cq);
SAME(vb_qp_init_attr, cap, ibv_qp_init_attr, cap);
SAME(vb_qp_init_attr, cap.max_inline_data, ibv_qp_init_attr, cap.max_inline_data);
SAME(vb_qp_init_attr, qp_type, ibv_qp_init_attr, qp_type);
SAME(vb_qp_init_attr, sq_sig_all, ibv_qp_init_attr, sq_sig_all);
_Static_assert(sizeof(vb_qp_init_attr) == sizeof(struct ibv_qp_init_attr), "read as a whole");

SAME(vb_qp_attr, qp_state, ibv_qp_attr, qp_state);
SAME(vb_qp_attr, qkey, ibv_qp_attr, qkey);
SAME(vb_qp_attr, sq_psn, ibv_qp_attr, sq_psn);
SAME(vb_qp_attr, pkey_index, ibv_qp_attr, pkey_index);
SAME(vb_qp_attr, port_num, ibv_qp_attr, port_num);
_Static_assert(sizeof(vb_qp_attr) == sizeof(struct ibv_qp_attr), "read as a whole");

SAME(vb_ah_attr, grh.dgid, ibv_ah_attr, grh.dgid);
SAME(vb_ah_attr, grh.sgid_index, ibv_ah_attr, grh.sgid_index);
SAME(vb_ah_attr, grh.hop_limit, ibv_ah_attr, grh.hop_limit);
SAME(vb_ah_attr, dlid, ibv_ah_attr, dlid);
SAME(vb_ah_attr, is_global, ibv_ah_attr, is_global);
SAME(vb_ah_attr, port_num, ibv_ah_attr, port_num);
_Static_assert(sizeof(vb_ah_attr) == sizeof(struct ibv_ah_attr), "read as a whole");

SAME(vb_port_attr, state, ibv_port_attr, state);
SAME(vb_port_attr, active_mtu, ibv_port_attr, active_mtu);
SAME(vb_port_attr, lid, ibv_port_attr, lid);
SAME(vb_port_attr, link_layer, ibv_port_attr, link_layer);
_Static_assert(sizeof(vb_port_attr) >= sizeof(struct ibv_port_attr), "none writes beyond its end");

SAME(vb_async_event, event_type, ibv_async_event, event_type);
_Static_assert(sizeof(vb_async_event) == sizeof(struct ibv_async_event), "written as a whole");
_Static_assert(sizeof(vb_gid) == sizeof(union ibv_gid), "written as a whole");
_Static_assert(VB_GRH_BYTES == sizeof(struct ibv_grh), "before each datagram");

EQUAL(VB_QPT_UD, IBV_QPT_UD);
EQUAL(VB_WR_SEND, IBV_WR_SEND);
EQUAL(VB_SEND_SIGNALED, IBV_SEND_SIGNALED);
EQUAL(VB_SEND_INLINE, IBV_SEND_INLINE);
EQUAL(VB_WC_GRH, IBV_WC_GRH);
EQUAL(VB_WC_SUCCESS, IBV_WC_SUCCESS);
EQUAL(VB_ACCESS_LOCAL_WRITE, IBV_ACCESS_LOCAL_WRITE);
EQUAL(VB_PORT_ACTIVE, IBV_PORT_ACTIVE);
EQUAL(VB_LINK_ETHERNET, IBV_LINK_LAYER_ETHERNET);
EQUAL(VB_MTU_4096, IBV_MTU_4096);
EQUAL(VB_QPS_RESET, IBV_QPS_RESET);
EQUAL(VB_EVENT_QP_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
EQUAL(VB_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
EQUAL(VB_QPS_INIT, IBV_QPS_INIT);
EQUAL(VB_QPS_RTR, IBV_QPS_RTR);
EQUAL(VB_QPS_RTS, IBV_QPS_RTS);
EQUAL(VB_QP_STATE, IBV_QP_STATE);
EQUAL(VB_QP_PKEY_INDEX, IBV_QP_PKEY_INDEX);
EQUAL(VB_QP_PORT, IBV_QP_PORT);
EQUAL(VB_QP_QKEY, IBV_QP_QKEY);
EQUAL(VB_QP_SQ_PSN, IBV_QP_SQ_PSN);
EQUAL(VB_EVENT_CQ_ERR, IBV_EVENT_CQ_ERR);
EQUAL(VB_EVENT_QP_FATAL, IBV_EVENT_QP_FATAL);
EQUAL(VB_EVENT_DEVICE_FATAL, IBV_EVENT_DEVICE_FATAL);
EQUAL(VB_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ACTIVE);
EQUAL(VB_EVENT_PORT_ERR, IBV_EVENT_PORT_ERR);
