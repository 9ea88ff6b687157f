/* The hosts: network namespaces, a TAP device in each, and the end of what runs in them. */
#ifndef LAB_HOSTS_H
#define LAB_HOSTS_H

#include "lab.h"

/* Makes the namespaces that shared asks for, and their devices: descriptors in device. Returns 0,
 * or -1 with errno set and shared->text saying what failed. */
int lab_hosts_make(lab_shared *shared, int *device);
/* Reads how many packets the kernel dropped on their way to the switch, into host_counts. */
void lab_hosts_overrun(lab_shared *shared);
/* Kills every process in the namespaces but this one, and returns when they are gone or after some
 * seconds. */
void lab_hosts_reap(const lab_shared *shared);

#endif
