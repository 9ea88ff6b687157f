/* A rate, kept by tokens: they come with time, and each byte that goes takes one. */
#ifndef LC_RATE_H
#define LC_RATE_H

#include <stdint.h>

typedef struct {
    double bytes_per_s; /* 0: no bound */
    double tokens;      /* bytes that may go now */
    double burst_bytes; /* least that may be saved up */
    uint64_t filled_ns; /* when tokens were last added */
} lc_rate;

void lc_rate_init(lc_rate *rate, double bytes_per_s, uint64_t now);
/* Goes on at another rate, with what is saved up. */
void lc_rate_set(lc_rate *rate, double bytes_per_s, double burst_bytes, uint64_t now);
/* Packets of packet_bytes that may go now; at most want. Takes nothing: what is asked here may be
 * refused by another rate. */
uint32_t lc_rate_room(const lc_rate *rate, uint64_t now, uint32_t want, uint32_t packet_bytes);
/* So many packets go now. */
void lc_rate_spend(lc_rate *rate, uint64_t now, uint32_t packets, uint32_t packet_bytes);
/* Nanoseconds until one packet may go; 0: now. */
uint64_t lc_rate_delay(const lc_rate *rate, uint64_t now, uint32_t packet_bytes);

/* A number of bytes/s in a byte, within 3%: 1 to 255, which stands for more, too;
 * 0: none. */
uint8_t lc_rate_level(double bytes_per_s);
double lc_rate_of_level(uint8_t level);

#endif
