//! Splicing: never worse than the stages alone, whatever pattern, budget and samples there are.

use burn::tensor::Device;
use burn_lean::prune::{
    Budget, ChitaConfig, DeadColumns, Groups, LayerKind, Layout, Method, Solution, SolverConfig,
    SparsityPattern, problem::Step, solve,
};

use crate::reference::Plain;
use crate::support::values;

/// Linear [16, 6], Linear [8, 4].
fn layout() -> Layout {
    let mut layout = Layout::new();
    layout.push("fc1.weight", [16, 6], LayerKind::Linear, 2.0);
    layout.push("fc2.weight", [8, 4], LayerKind::Linear, 30.0);
    layout
}

/// Every kind of feasible set.
fn configs() -> Vec<SolverConfig> {
    let groups = |groups| SparsityPattern::Groups(groups);
    let with = |budget, pattern| SolverConfig::new(budget).with_pattern(pattern);
    vec![
        SolverConfig::new(Budget::Sparsity(0.5)),
        SolverConfig::new(Budget::Sparsity(0.9)),
        SolverConfig::new(Budget::PerLayer(0.75)),
        SolverConfig::new(Budget::Flops {
            kept: 0.3,
            sparsity: Some(0.4),
        }),
        with(Budget::Pattern, SparsityPattern::NM { n: 2, m: 4 }),
        with(Budget::Keep(20), SparsityPattern::NM { n: 1, m: 4 }),
        with(Budget::Sparsity(0.6), groups(Groups::Inputs)),
        with(Budget::PerLayer(0.5), groups(Groups::Outputs)),
    ]
}

fn spliced(config: &SolverConfig, rounds: usize) -> SolverConfig {
    let chita = ChitaConfig::new().with_max_splices(rounds);
    config.clone().with_method(Method::Chita(chita))
}

/// The objectives of the search after its steps of one kind.
fn after(solution: &Solution, step: Step) -> Vec<f64> {
    let points = solution.trace.iter().filter(|point| point.step == step);
    points.map(|point| point.objective).collect()
}

#[test]
fn the_objective_is_never_above_the_one_without() {
    let layout = layout();
    let mut lower = 0;
    for seed in 0..60 {
        let plain = Plain {
            ridge: [1e-3, 1e-2, 0.1][(seed % 3) as usize],
            first_order: if seed % 4 == 0 { 0.1 } else { 0.0 },
            ..Plain::random(seed, 5 + (seed % 40) as usize, layout.len())
        };
        let problem = plain.problem_with(layout.clone(), &Device::flex());
        for config in configs() {
            let without = solve(&problem, &spliced(&config, 0)).unwrap();
            let solution = solve(&problem, &spliced(&config, 3)).unwrap();
            let squares = without.terms.fit + without.terms.ridge;
            let gain = (without.objective - solution.objective) / squares;
            assert!(gain >= -1e-6, "seed {seed}, {config:?}: {gain}");
            lower += usize::from(gain > 1e-4);
        }
    }
    println!("lower in {lower} of {}", 60 * configs().len());
    assert!(lower > 60 * configs().len() / 4, "{lower}");
}

/// 2 of 4 in 3 blocks: 216 supports.
#[test]
fn the_best_of_all_supports_of_a_pattern_is_found_more_often_than_without() {
    let pattern = SparsityPattern::NM { n: 2, m: 4 };
    let mut layout = Layout::new();
    layout.push("fc.weight", [4, 3], LayerKind::Linear, 2.0);
    let blocks = pattern.blocks(&layout).unwrap();
    let pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)];
    let mut found = [0; 2];
    for seed in 0..100 {
        let plain = Plain {
            ridge: [1e-3, 1e-2, 0.1][(seed % 3) as usize],
            ..Plain::random(7000 + seed, 4 + (seed % 15) as usize, 12)
        };
        let mut best = f64::INFINITY;
        for choice in 0..216 {
            let of = [choice % 6, choice / 6 % 6, choice / 36];
            let kept = blocks.iter().zip(of).flat_map(|(block, pair)| {
                let (a, b) = pairs[pair];
                [block[a], block[b]]
            });
            let mut support: Vec<usize> = kept.collect();
            support.sort_unstable();
            best = best.min(plain.objective(&plain.back_solve(&support)));
        }
        let problem = plain.problem_with(layout.clone(), &Device::flex());
        for (at, rounds) in [0, 3].into_iter().enumerate() {
            let config = SolverConfig::new(Budget::Pattern).with_pattern(pattern.clone());
            let support = solve(&problem, &spliced(&config, rounds)).unwrap().support;
            let own = plain.objective(&plain.back_solve(&support));
            found[at] += usize::from(own <= best * (1.0 + 1e-5));
        }
    }
    println!("found {found:?} of 100");
    assert!(found[1] > found[0], "{found:?}");
}

#[test]
fn blocks_are_spliced_by_their_own_objective() {
    let layout = layout();
    let mut lower = 0;
    for seed in 0..20 {
        let plain = Plain {
            first_order: if seed % 4 == 0 { 0.1 } else { 0.0 },
            ..Plain::random(seed, 20, layout.len())
        };
        let problem = plain.problem_with(layout.clone(), &Device::flex());
        for config in configs() {
            let config = config.with_block_size(Some(13));
            let without = solve(&problem, &spliced(&config, 0)).unwrap();
            let solution = solve(&problem, &spliced(&config, 3)).unwrap();
            // The same stages first.
            let stages = after(&solution, Step::Shrink);
            assert_eq!(after(&without, Step::Shrink), stages);
            let mut last = *stages.last().unwrap();
            let splices = after(&solution, Step::Splice);
            lower += usize::from(!splices.is_empty());
            for objective in splices {
                assert!(objective < last, "seed {seed}, {config:?}");
                last = objective;
            }
        }
    }
    println!("lower in {lower} of {}", 20 * configs().len());
    assert!(lower > 20, "{lower}");
}

#[test]
fn without_rounds_nothing_is_spliced_and_the_same_problem_has_the_same_solution_twice() {
    let problem = Plain::random(3, 30, 128).problem_with(layout(), &Device::flex());
    for config in configs() {
        let without = solve(&problem, &spliced(&config, 0)).unwrap();
        assert!(after(&without, Step::Splice).is_empty());
        assert!(!after(&without, Step::Shrink).is_empty());
        for rounds in [0, 1, 3] {
            let config = spliced(&config, rounds);
            let [first, second] = [(); 2].map(|()| solve(&problem, &config).unwrap());
            assert_eq!(first.support, second.support);
            assert!(after(&second, Step::Splice).len() <= rounds);
            assert_eq!(values(first.weights), values(second.weights));
        }
    }
}

#[test]
fn weights_without_gradients_that_went_first_do_not_come_back() {
    for seed in 0..20 {
        let mut plain = Plain::random(seed, 12, 128);
        let dead = [3, 17, 50, 90, 127];
        for index in dead {
            plain.gradients.iter_mut().for_each(|row| row[index] = 0.0);
            plain.dense[index] = 20.0;
        }
        let problem = plain.problem_with(layout(), &Device::flex());
        for budget in [Budget::Sparsity(0.5), Budget::Sparsity(0.9)] {
            let config = SolverConfig::new(budget);
            let first = config
                .clone()
                .with_dead_columns(Some(DeadColumns::PrunedFirst));
            let support = solve(&problem, &spliced(&first, 3)).unwrap().support;
            assert!(
                dead.iter().all(|index| !support.contains(index)),
                "seed {seed}"
            );
            // At their price they are the last to go.
            let support = solve(&problem, &spliced(&config, 3)).unwrap().support;
            assert!(
                dead.iter().all(|index| support.contains(index)),
                "seed {seed}"
            );
        }
    }
}

/// Nine of ten samples have gradients that the search leaves out, and all of them count.
#[test]
fn samples_that_the_search_leaves_out_do_not_raise_the_objective() {
    for seed in 0..40 {
        let mut plain = Plain::random(seed, 60, 96);
        plain.ridge = 0.02;
        for (row, gradients) in plain.gradients.iter_mut().enumerate() {
            if row % 10 != 0 {
                gradients
                    .iter_mut()
                    .for_each(|value| *value *= 1e-3 * (row % 7) as f64);
            }
        }
        let problem = plain.problem(&Device::flex());
        for sparsity in [0.5, 0.8, 0.95] {
            let config = SolverConfig::new(Budget::Sparsity(sparsity));
            let without = solve(&problem, &spliced(&config, 0)).unwrap().objective;
            let with = solve(&problem, &spliced(&config, 3)).unwrap().objective;
            assert!(
                with <= without * (1.0 + 1e-6),
                "seed {seed}: {with} for {without}"
            );
        }
    }
}
