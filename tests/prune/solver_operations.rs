//! Bounds on operations: all that fits is kept, and what is kept is nearly always the best.

use burn::tensor::Device;
use burn_lean::prune::{
    Budget, ChitaConfig, Groups, LayerKind, Layout, Method, SolverConfig, SparsityPattern, solve,
};

use crate::reference::Plain;

/// A cheap layer and a dear one, of twelve weights.
fn two(cheap: [usize; 2], dear: [usize; 2]) -> Layout {
    let mut layout = Layout::new();
    layout.push("cheap.weight", cheap, LayerKind::Linear, 2.0);
    layout.push("dear.weight", dear, LayerKind::Linear, 18.0);
    layout
}

/// Every pattern, with a layout that it divides.
fn patterns() -> [(SparsityPattern, Layout); 4] {
    let groups = SparsityPattern::Groups;
    [
        (SparsityPattern::Unstructured, two([2, 3], [3, 2])),
        (SparsityPattern::NM { n: 1, m: 2 }, two([4, 2], [2, 2])),
        (groups(Groups::Outputs), two([2, 3], [3, 2])),
        (groups(Groups::Inputs), two([2, 3], [3, 2])),
    ]
}

/// Budgets with and without a count.
fn budgets() -> impl Iterator<Item = Budget> {
    let both = [None, Some(0.5)].into_iter();
    both.flat_map(|sparsity| [0.3, 0.5, 0.7].map(|kept| Budget::Flops { kept, sparsity }))
}

/// Of few samples, and of more than there are weights.
fn plain(seed: u64) -> Plain {
    Plain {
        ridge: [1e-2, 0.05, 0.5][(seed % 3) as usize],
        ..Plain::random(6000 + seed, 4 + (seed as usize * 5) % 13, 12)
    }
}

/// Whether budget and pattern of a config allow a support.
fn allows(config: &SolverConfig, layout: &Layout, support: &[usize]) -> bool {
    let Budget::Flops { kept, sparsity } = config.budget else {
        panic!("{:?}", config.budget);
    };
    let cost = |index: &usize| layout.layer_at(*index).unwrap().flops_per_weight;
    let operations: f64 = support.iter().map(cost).sum();
    let all = layout.len();
    let k = sparsity.map_or(all, |sparsity| Budget::kept_count(sparsity, all).unwrap());
    let most = match config.pattern {
        SparsityPattern::NM { n, .. } => n,
        _ => usize::MAX,
    };
    let blocks = config.pattern.blocks(layout).unwrap();
    let fits = |block: &Vec<usize>| {
        let kept = block.iter().filter(|index| support.contains(index));
        kept.count() <= most
    };
    operations <= kept * layout.flops() && support.len() <= k && blocks.iter().all(fits)
}

#[test]
fn nothing_is_pruned_that_the_operations_have_room_for() {
    let methods = [
        (Method::Magnitude, None),
        (Method::DiagonalFisher, None),
        (Method::BackSolve, None),
        (Method::WoodFisher { block_size: 4 }, None),
        (Method::Chita(ChitaConfig::new()), None),
        (Method::Chita(ChitaConfig::new()), Some(4)),
    ];
    for seed in 0..3 {
        let plain = plain(seed);
        for (pattern, layout) in patterns() {
            let problem = plain.problem_with(layout.clone(), &Device::flex());
            let units = match pattern {
                SparsityPattern::Groups(_) => pattern.groups(&layout).unwrap(),
                _ => (0..12).map(|index| vec![index]).collect(),
            };
            for budget in budgets() {
                for (method, block_size) in &methods {
                    let config = SolverConfig::new(budget.clone())
                        .with_pattern(pattern.clone())
                        .with_method(method.clone())
                        .with_block_size(*block_size);
                    let support = solve(&problem, &config).unwrap().support;
                    assert!(
                        allows(&config, &layout, &support),
                        "seed {seed}, {config:?}: {support:?}"
                    );
                    for unit in units.iter().filter(|unit| !support.contains(&unit[0])) {
                        let more = [&support[..], &unit[..]].concat();
                        assert!(
                            !allows(&config, &layout, &more),
                            "seed {seed}, {config:?}: {unit:?} beside {support:?}"
                        );
                    }
                }
            }
        }
    }
}

/// Splicing looks at all pairs of so few weights: every exchange that there is room for, solved in F64.
#[test]
fn where_splicing_ends_none_improves_within_the_operations_in_nearly_every_problem() {
    let (mut optimal, mut dearer, mut all) = (0, 0, 0);
    for seed in 0..30 {
        let plain = plain(seed);
        for (pattern, layout) in patterns().into_iter().take(2) {
            let problem = plain.problem_with(layout.clone(), &Device::flex());
            for budget in budgets() {
                let config = SolverConfig::new(budget).with_pattern(pattern.clone());
                let support = &solve(&problem, &config).unwrap().support;
                let own = plain.objective(&plain.back_solve(support));
                let mut improves = false;
                for leaves in support {
                    for enters in (0..12).filter(|index| !support.contains(index)) {
                        let mut other = support.clone();
                        other.retain(|index| index != leaves);
                        other.push(enters);
                        if !allows(&config, &layout, &other) {
                            continue;
                        }
                        let cost = |index| layout.layer_at(index).unwrap().flops_per_weight;
                        dearer += usize::from(cost(enters) > cost(*leaves));
                        let objective = plain.objective(&plain.back_solve(&other));
                        // The search stops below improvements of 1e-6 of the objective.
                        improves |= objective < own * (1.0 - 2e-6);
                    }
                }
                all += 1;
                optimal += usize::from(!improves);
            }
        }
    }
    println!("{optimal} of {all} end there, {dearer} exchanges for a dearer weight are allowed");
    assert!(10 * optimal >= 9 * all, "{optimal} of {all}");
    assert!(dearer > 0);
}

/// Of all 4096 supports those that no other weight fits beside: one more never raises the objective.
#[test]
fn the_best_of_all_supports_within_the_operations_is_found_in_most_small_problems() {
    let layout = two([2, 3], [3, 2]);
    let (mut found, problems) = (0, 24);
    for seed in 0..problems {
        let plain = plain(100 + seed);
        let kept = [0.3, 0.5, 0.7][(seed % 3) as usize];
        let bound = kept * layout.flops();
        let mut best = f64::INFINITY;
        for bits in 0u32..1 << 12 {
            let (cheap, dear) = ((bits & 63).count_ones(), (bits >> 6).count_ones());
            let left = bound - f64::from(2 * cheap + 18 * dear);
            let is_full = (cheap == 6 || left < 2.0) && (dear == 6 || left < 18.0);
            if left >= 0.0 && is_full {
                let support: Vec<usize> = (0..12).filter(|at| bits >> at & 1 == 1).collect();
                best = best.min(plain.objective(&plain.back_solve(&support)));
            }
        }
        let budget = Budget::Flops {
            kept,
            sparsity: None,
        };
        let config = SolverConfig::new(budget);
        let problem = plain.problem_with(layout.clone(), &Device::flex());
        let support = solve(&problem, &config).unwrap().support;
        let own = plain.objective(&plain.back_solve(&support));
        assert!(
            own >= best * (1.0 - 1e-9),
            "seed {seed}: better than the best"
        );
        found += u64::from(own <= best * (1.0 + 1e-5));
    }
    println!("optimum in {found} of {problems}");
    assert!(2 * found >= problems, "optimum in {found} of {problems}");
}
