/* What a test may ask of the fake libibverbs (fake_verbs.c), beside what the environment says. */
#ifndef LC_FAKE_VERBS_H
#define LC_FAKE_VERBS_H

#include <stdint.h>

typedef struct {
    /* faults; 0: none */
    int open_errno;
    int create_errno;   /* of a queue pair */
    int no_inline;      /* queue pairs with room within requests are refused */
    int modify_errno;   /* of a queue pair that goes on after an error */
    int send_errno;     /* of posting, */
    int send_takes;     /* after so many requests */
    int receive_errno;  /* of the next posting of buffers, */
    int receive_takes;  /* after so many of them */
    int failing_status; /* of the next request: the queue pair stops */
    int poll_fails;
    int notify_fails;
    int port_state; /* 0: active */
    uint64_t lock_max;
    uint64_t carries; /* bytes of a datagram that the network lets through; 0: all */
    double loss;      /* share of the datagrams that vanish on the way */
    int mtu;          /* as a port says it: 1 to 5; 0: 5 */
    int infiniband;
    int no_grh;       /* datagrams come without: they tell the lid alone */
    int forged_grh;   /* of all that are sent */
    int short_status; /* the next datagrams that come are completed with it, or are too short: -1 */
    uint16_t partition;
    /* figures */
    uint64_t sent, completed, inlined, swallowed; /* beyond the MTU */
    uint64_t wrong_key, dropped, arrived, ways, notified;
} fake_verbs_state;

/* Exported. */
extern fake_verbs_state fake_verbs;
/* Raises an asynchronous event on all open devices; of the queue pair or the queues: 0: of each. */
void fake_verbs_event(int type, int port, int others);
int fake_verbs_sent(void);
int fake_verbs_open(void); /* devices */
void fake_verbs_lose(double share);

#endif
