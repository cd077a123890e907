"""Valid arguments of each operator, for tests of all operators; a new operator gets a line here."""

import tempfile
from pathlib import Path

import torch

import xsoftmax as xs

ops = torch.ops.xsoftmax
Q, D, N, S, K = 4, 5, 40, 6, 3  # queries, features, classes, candidates, codewords


def integers(high, *shape, dtype=torch.int64):
    return torch.randint(high, shape, dtype=dtype)


MIDX = (f"num_samples={S},codewords={K},bias=true,update_every=2,iterations=2,train_points=30,"
        "distinct=true")
LSH, KERNEL = f"num_samples={S},tables=2,bits=3", f"num_samples={S},kernel=sphere"


def adaptive_index(family, options, weight, bias):
    """Returns (tables, step) of an index that was refreshed on the table."""
    make, refresh = getattr(ops, family + "_index"), getattr(ops, family + "_refresh_")
    *tables, step = make("Sampler", N, D, torch.empty(0, dtype=torch.int64), options)
    refresh(weight, bias, step, tables, options)
    return tables, step


def sparse_rows(rows, features):
    """Returns (offsets, columns, values) of sparse rows with two entries each."""
    columns = torch.stack([torch.randperm(features)[:2].sort().values
                           for _ in range(rows)]).flatten().int()
    return torch.arange(rows + 1) * 2, columns, torch.randn(rows * 2)


def late(laid_out):
    """Returns the scalars of a static sampler with classes added after the first `laid_out`."""
    return [torch.tensor(laid_out), torch.tensor(0.01, dtype=torch.float64), torch.tensor(False)]


def all_rows(lists, rows):
    """Returns (offsets, rows) of lists that each hold every row."""
    return torch.arange(lists + 1) * rows, torch.arange(rows, dtype=torch.int32).repeat(lists)


def layer_training():
    """Returns arguments for two parents with three children each and eight examples."""
    labels = [torch.arange(7) * 4, torch.arange(0, 8, 2, dtype=torch.int32).repeat(6)]
    options = ("loss=squared_hinge,bias=1,positive_cost=1,negative_cost=1,tolerance=0.1,sweeps=10,"
               "threshold=0,max_weights=none,seed=0")
    return ([*sparse_rows(8, 6)], 6, [torch.tensor([0, 3, 6])], [*all_rows(2, 8)], labels,
            [torch.rand(24)], [], [options])


def row_nodes():
    """Returns arguments for the rows of three nodes."""
    offsets, columns, values = sparse_rows(8, 6)
    return [offsets], [columns], [torch.arange(6, dtype=torch.int32) // 2], 3, values


def linear_model():
    layers = []
    for parents, children in ((1, 2), (2, 6)):
        first_child = torch.linspace(0, children, parents + 1).long()
        labels = torch.arange(children + 1) * 4, torch.arange(0, 8, 2,
                                                              dtype=torch.int32).repeat(children)
        training = sparse_rows(8, 6), 6, [first_child], all_rows(parents, 8), labels, [], []
        layers.append(
            [first_child, *ops.linear_layers_train(*training, ["sweeps=10,threshold=0"])[:5]])
    return torch.classes.xsoftmax.XRLinear, (6, 1.0, "l3-hinge", torch.randperm(6), layers)


def optimizer_samples():
    """Returns arguments for a table with a row-sparse gradient and pending updates, and for a bias
    with a dense gradient."""
    made, weight, bias, rows, values = {}, torch.randn(N, D), torch.randn(N), integers(
        N, 5), torch.randn(5, D)
    for rule, options in (("row_adam", "lr=0.1,beta1=0.8,beta2=0.9,eps=1e-8,weight_decay=0.1"),
                          ("row_adagrad", "lr=0.1,weight_decay=0.1,eps=1e-10"),
                          ("row_sgd", "lr=0.1,momentum=0.9,weight_decay=0.1,nesterov=true")):
        state, step = (getattr(ops, rule + suffix) for suffix in ("_state", "_step_"))
        of_rows, dense = state(weight, True, options), state(bias, False, options)
        step([weight.clone()], [rows], [values], of_rows, [options], [1])
        terms = (rows.sort().values, torch.tensor([2, 0, 1, 2, 2],
                                                  dtype=torch.int32), torch.randn(5),
                 torch.randn(3, D))
        made |= {
            f"{rule}_state": (weight, True, options), f"{rule}_flush_": (weight, of_rows),
            f"{rule}_rows_": (weight, of_rows, rows, values, options, torch.tensor(0.2)),
            f"{rule}_terms_": (weight, of_rows, *terms, options, torch.tensor(0.2)),
            f"{rule}_check_terms": (weight, of_rows, *terms, options, torch.tensor(0.2)),
            f"{rule}_step_": ([weight, bias], [rows, None], [values, torch.randn(N)],
                              [*of_rows, *dense], [options], [2], [torch.tensor(0.2)])
        }
        made["forget_pending"], made["register_pending"] = (of_rows,), (weight, of_rows, "row_sgd")
        made["register_row_state"] = (weight, of_rows, 0.5)
    return made | dict(catch_up_=(weight,), row_norm=(rows, values, 2.0),
                       reset_rows_=(weight, torch.tensor([3, 0, N - 1]), torch.randn(3, D)))


def id_table_samples():
    """Returns arguments for a full IdTable with evicted, waiting and removed ids."""
    options, ids = "eviction=lfu,admission=2", (torch.arange(30) * 7 % 60 - 20) * 1_000_003
    state = ops.id_table(20, options)
    for step in range(12):
        ops.id_table_insert_((torch.arange(40)**2 * step % 61 - 20) * 1_000_003, state, options)
    ops.id_table_remove_(ids[:1], state)
    return dict(id_table=(20, options), id_table_check=(state, 20, options),
                id_table_find=(ids, state), id_table_ids=(torch.arange(20), state, -1),
                id_table_insert_=(ids, state, options), id_table_remove_=(ids[:5], state))


FOLDER = tempfile.TemporaryDirectory()  # removed when the process ends


def mapped_table_samples():
    """Returns arguments for a mapped table and for a file that does not exist."""
    count = len(list(Path(FOLDER.name).iterdir()))
    path = f"{FOLDER.name}/{count}"
    table = ops.mapped_table_create(path, [N, D], torch.float32)
    ops.mapped_table_flush_(table)
    return dict(mapped_table_changes=(table,),
                mapped_table_create=(path + ".new", [N, D], torch.float32),
                mapped_table_fill_=(table, 3, torch.randn(5, D)), mapped_table_flush_=(table,),
                mapped_table_open=(path, True, False), mapped_table_path=(table,),
                mapped_table_prefetch=(table, integers(N,
                                                       5)), mapped_table_remove_unfinished=(path,))


def samples():
    """Returns {name: new arguments}; a dict at the end holds keyword arguments."""
    torch.manual_seed(0)
    seed, input, weight, bias, target = torch.tensor(1), torch.randn(Q, D), torch.randn(
        N, D), torch.randn(N), integers(N, Q)
    private, shared, private_count, shared_count, target_count = integers(
        N, Q, S), torch.randperm(N)[:S], torch.randn(Q, S), torch.randn(S), torch.randn(Q)
    scores, class_weight, ones, mask = torch.randn(
        Q, 1 + 2 * S), torch.rand(N), torch.ones(Q), [True, True, True]
    uniform, probability, weights = torch.ones(N, dtype=torch.float64), torch.full(
        (N,), 1.0 / N, dtype=torch.float64), torch.arange(1, N + 1).double()
    tree = xs.LabelTree.balanced(N, 3)
    edges = torch.randn(tree.num_edges, D), torch.randn(tree.num_edges)
    sizes, groups = list(tree.layer_sizes), list(tree.group_sizes)
    nodes = ops.label_tree_nodes(tree.class_node, target, -100)
    paths = torch.stack([tree.class_node[target], tree.class_node[integers(N, Q)]], 1)
    (midx, step), (lsh, _), (kernel, _) = (adaptive_index("midx", MIDX, weight, bias),
                                           adaptive_index("lsh", LSH, weight, None),
                                           adaptive_index("kernel", KERNEL, weight, None))
    ragged = integers(N, 9), torch.tensor([0, 2, 2, 5, 9])
    path_sums = torch.randn(Q, tree.num_edges)
    estimator = "estimator=sampled_softmax,remove_accidental_hits=true,label_smoothing=0.1"
    reduction = "reduction=mean,ignore_index=-100"
    options = f"{estimator},{reduction},sparse_grad=true"
    sets = [private, shared], [private_count, shared_count], [target_count, None], [False, True]
    candidates = [private, shared, private_count, shared_count, target_count], [0, S]
    towers = input, input, target, torch.randn(S, D), torch.randn(Q, S, D), *candidates
    exact = "label_smoothing=0.1,logit_scale=0.5,softcap=3.0,z_loss=0.01"
    loss_state = ops.linear_cross_entropy_forward(input, weight, bias, target, class_weight, exact,
                                                  True)
    logits = "logit_scale=0.5,softcap=3.0"
    softmax_state = ops.linear_softmax_forward(input, weight, bias, private, True, logits)
    edge_grad = ops.hierarchical_softmax_forward(input, *edges, tree.first_child, tree.parent,
                                                 nodes, sizes, groups, [True, True])[2]
    inside = ops.sort_sets(ops.candidate_set(private, N), N)
    outside = f"num_classes={N},num_samples={S},tries=2"
    stream = f"num_ids={N},half_life=10"
    streaming = ops.streaming_counts("Counts", stream)
    ops.streaming_update_(shared, None, *streaming, stream)
    tower_options = (f"num_items={N},estimator=ranking,temperature=0.5,similarity=cosine,memory=9,"
                     f"dim={D},memory_warmup=0,reduction=mean")
    ids, memory = integers(N, Q), [torch.randn(9, D), integers(N, 9), torch.tensor([5, 1])]
    static = f"distribution=table,low=0,num_classes={N},num_samples={S},shared=true,distinct=true"
    tables, static_options = ops.static_tables("Sampler", weights, 0.5, shared, static)
    return optimizer_samples() | id_table_samples() | mapped_table_samples() | dict(
        advise_huge_pages=(weight,),
        adaptive_grow=("lsh", "Sampler", N + 2, torch.randn(2, D), None, [*lsh, step], LSH),
        adaptive_grow_=(torch.tensor(1), [lsh[1].clone(), lsh[3]],
                        [torch.zeros(2, 2, dtype=torch.int32),
                         torch.tensor(0)], N, N + 2),
        adaptive_index=("lsh", "Sampler", N, D, shared[:2], LSH),
        adaptive_log_count=("kernel", input, private, [*kernel, step], KERNEL),
        adaptive_refresh_=("midx", weight, bias, step, midx, MIDX),
        adaptive_resize=("midx", "Sampler", N + 2, torch.randn(
            2, D), torch.randn(N + 2), [*midx, step], MIDX),
        adaptive_sample=("lsh", seed, input, target, [*lsh, step], LSH),
        adaptive_step_=("midx", weight, bias, torch.tensor(4), midx, MIDX + ",refresh_every=4"),
        alias_sample=(seed, ops.alias_table(weights), Q, S, late(N - 4)),
        alias_table=(weights,),
        beam_search=(input, *edges, tree.first_child, tree.node_class, 4, "identity"),
        beam_tree_balance_=(edges[0], edges[1], tree.tables(), sizes),
        beam_tree_count_step_=(edges[0], edges[1], tree.tables(), sizes, torch.tensor(0),
                               "balance_every=1"),
        beam_tree_step=(input, *edges, target, tree.tables(), sizes, [],
                        f"complement:0:num_classes={N},num_samples={S},tries=0",
                        "num_candidates=4,beam=5", None, torch.tensor(0), None),
        beam_tree_candidates=(seed, input, *edges, tree.tables(), sizes,
                              "num_candidates=4,beam=5,routed=false"),
        beam_tree_loss=(input, *edges, target, tree.tables(), sizes, *sets, class_weight, options),
        candidate_batch=
        (scores, target, *sets,
         "corrects_target=true,needs_target_count=true,remove_accidental_hits=true,label_smoothing=0.1"
         ),
        candidate_loss=(scores, target, *sets, estimator),
        candidate_scores=(input, weight, bias, private, shared, True),
        candidate_scores_backward=(torch.randn(Q,
                                               2 * S), input, weight, private, shared, mask, ones),
        candidate_set=(private, N),
        candidate_shares=(scores, target, *sets, estimator),
        check_label_tree=(tree.tables(),),
        check_two_tower=(input, input, target, [torch.randn(Q, S, D), private
                                                ], torch.rand(Q), memory, True, tower_options),
        complement_log_count=(inside, private_count, private, private_count, target, target_count,
                              outside),
        complement_sample=(seed, inside, integers(N, Q, 2 * S), input, outside),
        counted_queries=(input, target, weight, -100),
        cpu_capability=(),
        cpu_products=(),
        distinct_ids=(shared, N, "Sampler", "exclude"),
        drawn_candidates=([private, shared], [False, True], Q, N),
        estimator_has_noise=("nce",),
        estimator_has_normalizer=("nce",),
        estimator_is_joined=("nce",),
        estimator_loss=(scores, target, *candidates, estimator),
        estimator_loss_backward=(ones, scores, target, *candidates, estimator),
        estimator_names=(),
        estimator_smooths=("nce",),
        estimator_replaces_a_sample=("nce",),
        follow_options=("Sampler", "power=0.5,uniform_share=0.1,refresh_every=2"),
        end_long_work=(),
        exclude_topk=(scores[:, :4].contiguous(), integers(N, Q, 4), integers(N, Q, 3), N, 2),
        get_impl=(),
        caller_set=(private, private_count, input, shared[:2], N, "Loss"),
        first_occurrences=(private,),
        hierarchical_log_prob=(path_sums, tree.parent, tree.class_node, sizes),
        hierarchical_softmax=(input, *edges, tree.first_child, tree.parent, nodes, sizes, groups,
                              True),
        hierarchical_softmax_backward=(ones, edge_grad, input, edges[0], tree.first_child,
                                       tree.parent, nodes, sizes, groups, mask),
        hierarchical_softmax_forward=(input, *edges, tree.first_child, tree.parent, nodes, sizes,
                                      groups, [True, True]),
        hierarchical_softmax_loss=(input, *edges, target, tree.tables(), sizes, groups,
                                   class_weight, reduction + ",sparse_grad=true"),
        hierarchical_topk=(input, *edges, tree.first_child, tree.node_class, 4),
        in_batch_log_count=(private, *streaming, torch.tensor(Q), stream),
        in_batch_sample=(target, shared, *streaming, torch.tensor(Q), stream),
        inclusion_log_count=(private_count.neg().abs().neg(), torch.tensor(5), 3, N),
        kernel_index=("Sampler", N, D, shared[:2], KERNEL),
        kernel_log_count=(input, private, [*kernel, step], KERNEL),
        kernel_refresh_=(weight, None, step, kernel, KERNEL),
        kernel_grow=("Sampler", N + 2, torch.randn(2, D), None, [*kernel, step], KERNEL),
        kernel_resize=("Sampler", N + 2, torch.randn(2, D), None, [*kernel, step], KERNEL),
        kernel_sample=(seed, input, target, [*kernel, step], KERNEL),
        kernel_step_=(weight, None, torch.tensor(4), kernel, KERNEL + ",refresh_every=4"),
        matcher_init_layer_=([*edges], input, private[:, :2].contiguous(), tree.tables(), sizes, 2,
                             "loss=squared_hinge,beam=3"),
        matcher_loss=(input, *edges, private[:, :2].contiguous(), tree.tables(), sizes, groups, 2,
                      "loss=logistic,beam=2,reduction=mean,sparse_grad=true"),
        matcher_next_layer_=(edges[0], tree.parent, sizes, 1),
        matcher_topk=(input, *edges, tree.tables(), 3, 5, private[:, :2].contiguous(), "beam=4"),
        known_ids=(private, N, "Loss", "ids"),
        kmeans=(seed, weight, 3, 2, weight[:3].clone()),
        check_sampled_loss=(input, weight, target, None, None, False, ""),
        fix_row_gradient=(weight, None),
        accept_row_terms=(weight,),
        drop_row_terms=(weight,),
        pending_row_terms=(weight,),
        write_row_terms=(weight,),
        row_terms=(private_count, private, ones, N),
        has_row_gradient=(weight,),
        is_row_table=(weight,),
        label_tree=(tree.parent, tree.node_class),
        label_tree_balanced=(torch.randperm(N), 3),
        label_tree_clusters=(seed, *sparse_rows(N, D), D,
                             "arity=3,iterations=4,max_leaf_size=5,balanced=false"),
        label_tree_cuts=(seed, [*sparse_rows(N, D)], D, torch.randperm(
            N, dtype=torch.int32), 1, 0, 2, "arity=3,iterations=4,max_leaf_size=5"),
        label_tree_equal_mass=(weights, 4),
        label_tree_from_vectors=(seed, weight,
                                 "arity=3,iterations=4,max_leaf_size=5,spherical=true"),
        label_tree_huffman=(weights, 3),
        label_tree_kmeans_order=(seed, weight, 3, 4),
        label_tree_layers=(tree.first_child,),
        label_tree_nodes=(tree.class_node, target, -100),
        label_tree_of_clusters=(torch.randperm(N, dtype=torch.int32), 3, 5),
        label_tree_path=(tree.class_node, tree.parent, private, len(sizes)),
        linear_candidate_loss=(input, weight, bias, target, *candidates, options),
        linear_candidate_loss_forward=(input, weight, bias, target, *candidates, options,
                                       [True, True]),
        linear_cross_entropy=(input, weight, bias, target, class_weight, exact),
        linear_cross_entropy_backward=(ones, input, weight, bias, target, class_weight,
                                       *loss_state[1:], exact, mask),
        linear_cross_entropy_forward=(input, weight, bias, target, class_weight, exact, True),
        linear_cross_entropy_with_gradients=(ones, input, weight, bias, target, class_weight, exact,
                                             mask),
        linear_entropy=(input, weight, bias, logits),
        label_layers=(tree.tables(), sizes),
        layer_negatives=(["tfn", "tfn+man"], 2, False),
        linear_layers_train=layer_training(),
        linear_log_prob=(input, weight, bias, private, logits),
        linear_positives_loss=(input, weight, bias, integers(N, Q, 3), class_weight, reduction),
        linear_scores=(input, weight, bias),
        linear_soft_loss=(input, weight, bias, private, torch.rand(
            Q, S), class_weight, exact.replace("0.1", "0")),
        linear_softmax=(input, weight, bias, private, True, logits),
        linear_softmax_backward=(torch.randn(Q, S), ones, ones, input, weight, bias, private,
                                 softmax_state[3], softmax_state[2], logits, mask),
        linear_softmax_forward=(input, weight, bias, private, True, logits),
        linear_topk=(input, weight, bias, 3, "logit_scale=2.0,softcap=3.0"),
        listed=(shared, private),
        log_uniform_log_count=(private, 2, N, 0.5),
        log_uniform_sample=(seed, 2, N, Q, S),
        loss_of_shares=(torch.randn(
            3, Q, 6), [False, True], "estimator=sampled_softmax,remove_accidental_hits=true"),
        lsh_index=("Sampler", N, D, shared[:2], LSH),
        lsh_log_count=(input, private, [*lsh, step], LSH),
        lsh_refresh_=(weight, None, step, lsh, LSH),
        lsh_grow=("Sampler", N + 2, torch.randn(2, D), None, [*lsh, step], LSH),
        lsh_resize=("Sampler", N + 2, torch.randn(2, D), None, [*lsh, step], LSH),
        lsh_sample=(seed, input, target, [*lsh, step], LSH),
        lsh_step_=(weight, None, torch.tensor(4), lsh, LSH + ",refresh_every=4"),
        merge_log_counts=([private_count, private_count[0]],),
        midx_cells=(midx[2], bias, K, N),
        midx_codebooks=(seed, weight, midx[0], midx[1], 2, True),
        midx_codebook_loss=(midx[0], midx[1], weight, bias, input),
        midx_encode=(weight, midx[0], midx[1]),
        midx_index=("Sampler", N, D, shared[:2], MIDX),
        midx_log_count=(input, private, [*midx, step], MIDX + ",shared=true"),
        midx_note_=(midx[9], torch.tensor(3.0, dtype=torch.float64), step, input, target, private),
        midx_refresh_=(weight, bias, step, midx, MIDX),
        midx_grow=("Sampler", N + 2, torch.randn(
            2, D), torch.randn(2), [*midx, step], MIDX.replace("distinct=true", "distinct=false")),
        midx_resize=("Sampler", N + 2, torch.randn(2, D), torch.randn(N + 2), [*midx, step], MIDX),
        midx_sample=(seed, input, target, [*midx, step], MIDX),
        midx_search_index=(weight, bias, midx[0], midx[1], 0, seed, input),
        midx_step_=(weight, bias, torch.tensor(4), midx, MIDX + ",refresh_every=4"),
        midx_training_slots=(seed, N, 7),
        midx_update_=(weight, bias, shared, step, midx, MIDX),
        node_rows=row_nodes(),
        parent_rows=(1, list(sparse_rows(
            8, 6)[:2]), [], [], torch.arange(6, dtype=torch.int32) // 2, 3),
        positives_cross_entropy=(input, weight, bias, integers(N, Q, 3), torch.rand(
            Q, 3), "z_loss=0.1,softcap=2.0"),
        positives_cross_entropy_backward=(ones, input, weight, bias, integers(
            N, Q, 3), torch.rand(Q, 1), "positives=sum", mask),
        always_scored_log_count=(private, private_count, shared),
        always_scored_set=(private,),
        ragged_scores=(input, weight, bias, *ragged, True),
        ragged_scores_backward=(torch.randn(9), input, weight, *ragged, mask),
        read_examples=("examples.txt",),
        reduced_loss=(torch.rand(Q), target, class_weight, reduction),
        next_refresh_is_due=(torch.tensor(5), 10),
        refresh_is_due=(5, 10),
        resize_tables_=([weight, bias], [torch.randn(3, D), torch.randn(3)], [N + 3, N + 3]),
        sampled_softmax_loss=(input, weight, bias, target, *sets, class_weight, torch.tensor(0.5),
                              options.replace("0.1", "0")),
        pinned_table=(weight, [N, D]),
        scale_gradient=(input, torch.rand(Q, 1), input),
        mean_shares=(target, -100, torch.float32),
        scale_loss_gradients=(torch.rand(Q), target, -100, input, torch.rand(Q, 5), input),
        perturbed_argmax=(input, weight, bias,
                          ops.search_index(weight, bias, integers(K, N, dtype=torch.int32),
                                           K), torch.randn(Q, N)),
        search_budget=(input, weight, bias,
                       ops.search_index(weight, bias, integers(K, N, dtype=torch.int32),
                                        K), 3, 0.9),
        search_index=(weight, bias, integers(K, N, dtype=torch.int32), K, input),
        search_topk=(input, weight, bias,
                     ops.search_index(weight, bias, integers(K, N, dtype=torch.int32),
                                      K), 3, "max_cells=2"),
        set_impl=("kernel",),
        shortlist=(tree.parent[paths], paths, tree.first_child, tree.parent, tree.arity),
        soft_targets=(input, private, torch.rand(Q, S), -100, "Loss"),
        sampled_step=(input, weight, bias, target, [shared
                                                    ], "head:1:", options, None, True, True, []),
        sampler_log_count=(input, private, tables, f"static:7:{static_options}"),
        sampler_sample=(input, target, [shared, *tables],
                        f"disjoint:0:[head:1:;static:7:{static_options}]", None, True, 0),
        sampler_sample_outside=(input, ops.candidate_set(
            private, N), target, [], f"complement:0:num_classes={N},num_samples={S},tries=0", None,
                                False, 0),
        sampler_step_=(weight, None, [*lsh, torch.tensor(4)], f"lsh:6:{LSH},refresh_every=4", None),
        sort_sets=(ops.candidate_set(private, N), N),
        canonical_rows=(*sparse_rows(8, 6), 6, "features"),
        sparse_row_sums=(*sparse_rows(8, 6), 6, *all_rows(3, 8)),
        static_follow_=(target, shared, shared[:2], torch.tensor(0), *streaming, tables, stream,
                        "power=0.5,refresh_every=2,distinct=true"),
        static_log_count=(private, tables, static_options),
        static_grow_=([table.clone() for table in tables], late(N), N + 2),
        static_resize=("Sampler", tables, N + 2, "", static_options),
        static_sample=(seed, input, target, tables, static_options),
        static_tables=("Sampler", weights, 0.5, shared, static),
        streaming_count=(private, *streaming, stream),
        streaming_counts=("Counts", stream),
        streaming_forget_=(private, *streaming, stream),
        streaming_log_prob=(private, *streaming, stream),
        streaming_resize_=(*streaming, N + 2, stream),
        streaming_update_=(private, private > 3, *streaming, stream),
        systematic_sample=(seed, probability, *ops.systematic_table(uniform), Q, S, late(N)),
        systematic_table=(weights,),
        table_log_prob=(probability, private),
        tower_loss=(input, input, target, [torch.randn(
            Q, S, D), torch.randn(S, D)], *sets, torch.rand(Q), estimator + ",reduction=mean"),
        tower_loss_forward=(*towers, ones, estimator, [True] * 4),
        tower_losses=(*towers, estimator),
        transform_logits=(scores, "logit_scale=2.0,softcap=3.0"),
        tree_balance_=(edges[0], tree.first_child, sizes),
        tree_class_scores=(path_sums, tree.parent, tree.class_node, sizes, 1),
        tree_cross_entropy=(input, *edges, target, tree.tables(), sizes, class_weight, reduction),
        tree_queries=(input, target, *edges, tree.tables(), -100),
        tree_routed_candidates=(seed, torch.randn(Q, 6), tree.first_child, tree.node_class, 3),
        tree_scores=(input, *edges, tree.parent, paths, sizes, True, True),
        tree_scores_backward=(torch.randn(
            Q, 2), input, edges[0], tree.parent, paths, sizes, True, mask),
        union_classes=(input, target, [private, shared]),
        union_merge=([shared, private], [private_count[0], private_count], [
            None, torch.randn(Q, 1 + len(shared))
        ], [0, 1], 1, [private_count], [1], target),
        two_tower_loss_=(input, torch.randn(Q, D), ids, [torch.randn(
            S, D), integers(N, S)], [torch.randn(2 * Q, D),
                                     torch.cat([ids, target])], torch.rand(Q), torch.tensor(0.5),
                         list(streaming), memory, [True, True], stream, tower_options),
        two_tower_memory=(memory, 0),
        two_tower_resized=("Loss", memory, 3, False, tower_options),
        two_tower_state=("Loss", tower_options, N),
        two_tower_topk=(input, weight, torch.tensor(0.5), 3, integers(N, Q, 2), tower_options),
        two_tower_update_=(ids, input, list(streaming), memory, stream),
        watch_long_work=(torch.zeros(3, dtype=torch.int64), False),
        weighted_tower_loss=(*towers, ones, estimator),
        uniform_sample=(seed, 2, N, Q, S, True),
        xr_linear_check_target=("model",),
        xr_linear_load=("model",),
    )


def class_samples():
    """Returns {name: (callable, arguments)} for methods of classes."""
    torch.manual_seed(0)
    made, arguments = linear_model()
    model = made(*arguments)
    rows = sparse_rows(Q, 6)
    queries = torch.sparse_csr_tensor(rows[0], rows[1].long(), rows[2], (Q, 6),
                                      check_invariants=True)
    predict = (*rows[:1], rows[1] % 4, rows[2], torch.randn(Q, 2), 4, 3, 2, "l3-hinge", "multiply",
               torch.arange(4))
    return {
        "XRLinear": (made, arguments), "XRLinear.predict": (model.predict, predict),
        "XRLinear.predict_csr": (model.predict_csr, (queries, 3, 2)),
        "XRLinear.layer": (model.layer, (1,)), "XRLinear.save": (model.save, ("model", "notes"))
    }
