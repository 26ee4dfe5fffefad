/* Grow one row's tree from recurrent heads without randomness, as `grow` in drafters/heads.py does. In Python, the work
   between two levels takes as long as a level. */

#define DEEPEST 16 /* levels, as in calibration.py */

/* Acceptance probability as a function of log-probability, linear between knots; the knots of a depth begin at
   `starts[depth]`. `reached`: probability that a node of each level has an accepted child. */
typedef struct {
    const double *knots, *shares, *reached;
    const int64_t *starts;
    int64_t depths;
} curves;

typedef struct {
    curves of_path[2];     /* after paths of best drafts only, and after others */
    const int64_t *tokens; /* of the draft vocabulary */
    double threshold, level_threshold;
    int64_t max_nodes, most_children, levels, ranks, base; /* the slot of the root's entry */
} growth;

/* A node of the newest level: its parent's index in the previous level, whether its path has left the best one, and the
   slots of its path. */
typedef struct {
    int64_t node, above, off_best, path[DEEPEST];
} leaf;

typedef struct {
    double prob;
    int64_t index; /* of a node, or of a leaf and a rank together */
} choice;

/* By descending probability, then by index. */
static int compare_choices(const void *left, const void *right) {
    const choice *a = left, *b = right;
    if (a->prob != b->prob) return a->prob > b->prob ? -1 : 1;
    return a->index < b->index ? -1 : 1;
}

static double accepted(const curves *of, int64_t depth, double log_prob) {
    int64_t at = depth < of->depths ? of->starts[depth] : 0, stop = depth < of->depths ? of->starts[depth + 1] : 0;
    if (at == stop || log_prob != log_prob) return __builtin_exp(log_prob);
    if (log_prob <= of->knots[at]) return of->shares[at];
    if (log_prob >= of->knots[stop - 1]) return of->shares[stop - 1];
    while (of->knots[at + 1] <= log_prob) at++;
    double slope = (of->shares[at + 1] - of->shares[at]) / (of->knots[at + 1] - of->knots[at]);
    return slope * (log_prob - of->knots[at]) + of->shares[at];
}

/* Return the number of nodes, or the status of `level` if not 0. Fills tokens (tokens[0] is the root's, given) and parents,
   [2, 2 * max_nodes], probabilities, and the number of drafted levels. `at`, `pending` and `above` describe the pending
   entries, see `level`. */
int64_t grow(const recurrent *heads, const growth *how, kv_view *at, const int64_t *pending, const number *above,
             int64_t *tokens, double *probs, int64_t *drafted, int threads) {
    int64_t most = how->max_nodes, ranks = how->ranks, nodes = 1, slots = 0, width = 1, *parents = tokens + 2 * most;
    int64_t of_level[most], columns[most], entries[most * (FURTHER + DEEPEST)], renumbered[2 * most];
    leaf leaves[most], next[most];
    choice choices[most * (ranks + 1)];
    double chosen[most * ranks];
    int64_t of_table = 3 * most * ranks * sizeof(int32_t);
    int64_t bytes = of_table + most * (heads->lm_head.inputs + heads->lm_head.outputs) * sizeof(number);
    int32_t *table = thread_scratch(5, bytes);
    if (!table) return NO_MEMORY;
    number *feedback = (number *)(table + 3 * most * ranks), *logits = feedback + most * heads->lm_head.inputs;
    leaves[0] = (leaf){0};
    probs[0] = 1, parents[0] = -1;
    for (*drafted = 0; *drafted < how->levels && width; ++*drafted) {
        int64_t depth = *drafted, count = 0;
        if (depth) {
            double promised = 0;
            for (int64_t m = 0; m < width; m++) {
                double more = probs[leaves[m].node] * how->of_path[leaves[m].off_best].reached[depth] - how->threshold;
                promised += more > 0 ? more : 0;
            }
            if (promised < how->level_threshold) break;
            for (int64_t m = 0; m < width; m++) {
                int64_t *entry = entries + m * (FURTHER + depth), slot = how->base + 1 + slots++;
                leaves[m].path[depth - 1] = slot;
                entry[ROW] = 0, entry[SLOT] = slot, entry[POSITION] = how->base + depth, entry[BEFORE] = how->base + 1;
                memcpy(entry + FURTHER, leaves[m].path, depth * sizeof slot);
                of_level[m] = tokens[leaves[m].node], columns[m] = leaves[m].above;
            }
            for (int64_t n = 0; n < heads->depth; n++)
                at[n].entries = entries, at[n].last = NULL, at[n].count = at[n].requested = width, at[n].further = depth;
        }
        int status = level(heads, NULL, NULL, depth ? of_level : pending, depth ? columns : NULL,
                           depth ? feedback : above, at, feedback, logits, threads);
        if (status) {
            nodes = status;
            break;
        }
        best_drafts(logits, width, heads->lm_head.outputs, ranks, how->tokens, table);
        for (int64_t m = 0; m < width; m++)
            for (int64_t rank = 0; rank < ranks; rank++) {
                float log_prob;
                memcpy(&log_prob, table + m * ranks + rank, sizeof log_prob);
                double prob = probs[leaves[m].node] * accepted(how->of_path + leaves[m].off_best, depth, log_prob);
                if (!(prob >= how->threshold && prob > 0)) break;
                choices[count++] = (choice){prob, m * ranks + rank};
            }
        qsort(choices, count, sizeof *choices, compare_choices);
        memset(chosen, 0, sizeof chosen);
        for (int64_t c = 0; c < count && c < how->most_children; c++) chosen[choices[c].index] = choices[c].prob;
        int64_t children = 0;
        for (int64_t k = 0; k < width * ranks; k++)
            if (chosen[k]) {
                leaf *child = next + children++;
                *child = leaves[k / ranks];
                child->node = nodes, child->above = k / ranks;
                if (k % ranks) child->off_best = 1;
                tokens[nodes] = table[2 * width * ranks + k], parents[nodes] = leaves[k / ranks].node;
                probs[nodes++] = chosen[k];
            }
        if (nodes > most) { /* keep the best, parents before children */
            for (int64_t m = 1; m < nodes; m++) choices[m - 1] = (choice){probs[m], m}, renumbered[m] = 0;
            qsort(choices, nodes - 1, sizeof *choices, compare_choices);
            for (int64_t m = 0; m < most - 1; m++) renumbered[choices[m].index] = 1;
            renumbered[0] = 0;
            for (int64_t m = 1, kept = 1; m < nodes; m++)
                if (renumbered[m]) {
                    tokens[kept] = tokens[m], parents[kept] = renumbered[parents[m]], probs[kept] = probs[m];
                    renumbered[m] = kept++;
                }
            nodes = most;
        } else
            for (int64_t m = 0; m < nodes; m++) renumbered[m] = m;
        width = 0;
        for (int64_t m = 0; m < children; m++)
            if (renumbered[next[m].node]) leaves[width] = next[m], leaves[width++].node = renumbered[next[m].node];
    }
    release(table, bytes);
    return nodes;
}
