#include "cells.h"

#include <stdlib.h>
#include <string.h>

size_t lc_cell_bytes(uint32_t payload_bytes) {
    return (sizeof(lc_cell) + payload_bytes + 63) & ~(size_t)63;
}

lc_cells lc_cells_of(void *memory, uint32_t n, uint32_t payload_bytes) {
    return (lc_cells){.memory = memory, .cell_bytes = lc_cell_bytes(payload_bytes), .n_cells = n};
}

int lc_cells_make(lc_cells *cells, uint64_t bytes, uint16_t payload_bytes) {
    size_t size = lc_cell_bytes(payload_bytes);
    *cells = lc_cells_of(NULL, 0, payload_bytes);
    if (bytes < size)
        return 1;
    cells->n_cells = bytes / size < UINT32_MAX ? (uint32_t)(bytes / size) : UINT32_MAX;
    cells->memory = malloc(cells->n_cells * size);
    return cells->memory != NULL;
}

void lc_cells_drop(lc_cells *cells) {
    free(cells->memory);
}

static lc_cell *take(lc_cells *cells) {
    lc_cell *cell = cells->free;
    if (cell)
        cells->free = cell->next;
    else if (cells->fresh < cells->n_cells)
        cell = (lc_cell *)(void *)(cells->memory + cells->cell_bytes * cells->fresh++);
    return cell;
}

void lc_waiting_add(lc_waiting *list, lc_cell *cell) {
    cell->next = NULL;
    if (list->last)
        list->last->next = cell;
    else
        list->first = cell;
    list->last = cell;
    list->n++;
}

int lc_waiting_has(const lc_waiting *list, const lc_header *h) {
    const lc_header *last = list->last ? &list->last->header : NULL;
    return last && last->group == h->group && last->op == h->op && last->slot == h->slot &&
           last->packet == h->packet;
}

lc_cell *lc_cells_put(lc_cells *cells, const lc_header *h, const uint8_t *payload) {
    lc_cell *cell = take(cells);
    if (!cell)
        return NULL;
    cell->header = *h;
    memcpy(cell->payload, payload, h->length);
    return cell;
}

int lc_cells_keep(lc_cells *cells, lc_waiting *list, const lc_header *h, const uint8_t *payload) {
    lc_cell *cell = lc_cells_put(cells, h, payload);
    if (!cell)
        return 0;
    lc_waiting_add(list, cell);
    return 1;
}

void lc_cells_free(lc_cells *cells, lc_cell *cell) {
    cell->next = cells->free;
    cells->free = cell;
}
