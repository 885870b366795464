//! Kept weights on a grid, against all codes of small problems and against the rules written out.

use burn::tensor::Device;
use burn_lean::prune::{
    Budget, ChitaConfig, GridConfig, LayerKind, Layout, Method, PruneError, Solution, SolverConfig,
    problem::{Rounded, Step},
    solve,
    solver::{FirstCodes, LayerGrid},
};

use crate::reference::Plain;
use crate::support::{each_device, values};

/// One layer `[p]` whose weights share a scale.
fn shared(levels: (i32, i32)) -> LayerGrid {
    LayerGrid::new("weights", vec![1], levels)
}

/// Rounds everything, or what the budget leaves of the largest weights.
fn on_grid(budget: Budget, grid: GridConfig) -> SolverConfig {
    SolverConfig::new(budget)
        .with_method(Method::BackSolve)
        .with_grid(Some(grid))
}

fn wide(solution: &Solution) -> Vec<f64> {
    let weights = values(solution.weights.clone());
    weights.iter().map(|weight| f64::from(*weight)).collect()
}

fn rounded(solution: &Solution) -> &Rounded {
    solution.rounded.as_ref().unwrap()
}

/// What codes of one layer with one scale stand for.
fn decoded(codes: &[i32], scale: f32) -> Vec<f64> {
    codes
        .iter()
        .map(|code| f64::from(*code as f32 * scale))
        .collect()
}

/// All codes from −1 to 1 of the weights at `support`, with 0 for the others: the best objective.
fn best_of_all(plain: &Plain, scale: f32, support: &[usize]) -> f64 {
    let mut best = f64::INFINITY;
    for mut number in 0..3usize.pow(support.len() as u32) {
        let mut codes = vec![0; plain.p()];
        for index in support {
            codes[*index] = (number % 3) as i32 - 1;
            number /= 3;
        }
        best = best.min(plain.objective(&decoded(&codes, scale)));
    }
    best
}

/// 120 problems of 4 to 7 weights, each with all codes of its largest weights tried: how often a search
/// finds the best ones, and by how much it misses on average.
#[test]
fn codes_are_mostly_the_best_of_all_on_their_support() {
    let layers = || vec![shared((-1, 1)).with_scales(vec![0.6])];
    let grids = [
        ("nearest", GridConfig::nearest(layers())),
        ("compensated", GridConfig::compensated(layers())),
        ("codes", GridConfig::new(layers()).with_fit_scales(false)),
    ];
    let problems = 120;
    let (mut found, mut excess) = ([0; 3], [0.0; 3]);
    for seed in 0..problems {
        let p = 4 + seed as usize % 4;
        let plain = Plain {
            ridge: [1e-2, 0.1, 1.0][seed as usize % 3],
            first_order: if seed % 5 == 0 { 0.1 } else { 0.0 },
            ..Plain::random(7000 + seed, 3 + seed as usize % 9, p)
        };
        let all: Vec<usize> = (0..p).collect();
        let floor = plain.objective(&plain.back_solve(&all));
        let k = 1 + seed as usize % p;
        let budget = match k == p {
            true => Budget::All,
            false => Budget::Keep(k),
        };
        let mut largest = all;
        largest.sort_by(|a, b| plain.dense[*b].abs().total_cmp(&plain.dense[*a].abs()));
        let best = best_of_all(&plain, 0.6, &largest[..k]);
        let problem = plain.problem(&Device::flex());
        for (at, (name, grid)) in grids.iter().enumerate() {
            let solution = solve(&problem, &on_grid(budget.clone(), grid.clone())).unwrap();
            let weights = wide(&solution);
            let codes = &rounded(&solution).layers[0].codes;
            assert_eq!(weights, decoded(codes, 0.6), "{name}, seed {seed}");
            assert!(solution.support.len() <= k);
            let own = plain.objective(&weights);
            // Over fewer rows, and in the linear term, products are in F32.
            assert!((own - solution.objective).abs() <= 1e-6 * (own - floor).max(1.0));
            assert!(
                own >= best - 1e-9,
                "{name}, seed {seed}: better than the best"
            );
            let gap = (own - best) / (best - floor);
            found[at] += usize::from(gap < 1e-9);
            excess[at] += gap / problems as f64;
        }
    }
    println!("optimum in {found:?} of {problems}, mean excess {excess:.3?}");
    assert!(found[0] < found[1] && found[1] < found[2], "{found:?}");
    assert!(found[2] * 10 >= 9 * problems as usize, "{found:?}");
    assert!(
        excess[2] < 0.6 * excess[1] && excess[1] < excess[0],
        "{excess:?}"
    );
}

/// The rule written out: H over what is left is solved anew for every weight.
#[test]
fn compensation_is_the_best_values_of_what_is_left_weight_by_weight() {
    for (n, p, ridge) in [(20, 80, 0.05), (12, 70, 1e-3), (90, 40, 0.05)] {
        let plain = Plain {
            ridge,
            ..Plain::random(42, n, p)
        };
        let scale = 0.25f32;
        let layers = vec![shared((-3, 3)).with_scales(vec![scale])];
        let config = on_grid(Budget::All, GridConfig::compensated(layers));
        let solution = solve(&plain.problem(&Device::flex()), &config).unwrap();

        let squares = |j: usize| {
            plain
                .gradients
                .iter()
                .map(|row| row[j] * row[j])
                .sum::<f64>()
        };
        let mut order: Vec<usize> = (0..p).collect();
        order.sort_by(|a, b| squares(*b).total_cmp(&squares(*a)));
        let mut decided = plain.dense.clone();
        let mut codes = vec![0; p];
        for (at, index) in order.iter().enumerate() {
            // The best values of the rest, given those that are decided.
            let left = &order[at..];
            let best = given(&plain, &decided, left)[*index];
            codes[*index] = (best / f64::from(scale)).round_ties_even().clamp(-3.0, 3.0) as i32;
            decided[*index] = f64::from(codes[*index] as f32 * scale);
        }
        assert!(plain.objective(&decided) < rounded(&solution).nearest);
        assert_eq!(rounded(&solution).layers[0].codes, codes, "n {n}, p {p}");
    }
}

/// The weights with the best values at `left`, the others as they are.
fn given(plain: &Plain, weights: &[f64], left: &[usize]) -> Vec<f64> {
    // Around other weights the problem is one of their differences.
    let mut shifted = plain.clone();
    let mut fixed: Vec<f64> = weights
        .iter()
        .zip(&plain.dense)
        .map(|(w, d)| w - d)
        .collect();
    left.iter().for_each(|index| fixed[*index] = 0.0);
    // ½‖G(d_left + d_fixed)‖²: pruning weights of −d_fixed leaves the same.
    shifted.dense = fixed.iter().map(|change| -change).collect();
    let solved = shifted.back_solve(left);
    let mut best = weights.to_vec();
    left.iter()
        .for_each(|index| best[*index] = plain.dense[*index] + solved[*index]);
    best
}

#[test]
fn no_step_after_the_first_codes_raises_the_objective_and_the_residual_stays_exact() {
    for magnitude in [1.0, 300.0, 30_000.0f32] {
        let mut plain = Plain::random(5, 60, 200);
        let scaled = |value: &mut f64, factor: f32| *value = f64::from(*value as f32 * factor);
        for row in &mut plain.gradients {
            row.iter_mut().for_each(|value| scaled(value, magnitude));
        }
        plain
            .dense
            .iter_mut()
            .for_each(|value| scaled(value, magnitude));
        each_device(|target| {
            let grid = GridConfig::new(vec![shared((-3, 3))]).with_tolerance(0.0);
            let config = on_grid(Budget::Keep(80), grid);
            let solution = solve(&plain.problem(&target.device), &config).unwrap();
            let steps: Vec<_> = solution.trace.iter().map(|point| point.step).collect();
            for step in [Step::Round, Step::CodeDescent, Step::Scales] {
                assert!(steps.contains(&step), "{steps:?}");
            }
            let first = steps.iter().position(|step| *step == Step::Round).unwrap();
            for pair in solution.trace[first..].windows(2) {
                let (before, after) = (pair[0].objective, pair[1].objective);
                assert!(
                    after <= before * (1.0 + 1e-12),
                    "{before} to {after}: {:?}",
                    pair[1].step
                );
                assert!(pair[1].k <= 80);
            }
            // After thousands of updates it is what it is anew.
            let anew = plain.objective(&wide(&solution));
            let drift = (solution.objective - anew).abs() / anew;
            assert!(drift < 1e-9, "magnitude {magnitude}: {drift:e}");
            let rounded = rounded(&solution);
            assert!(solution.objective < rounded.nearest, "{rounded:?}");
        });
    }
}

#[test]
fn at_the_end_no_code_and_no_scale_alone_is_better() {
    for seed in 0..10 {
        let plain = Plain::random(60 + seed, 25, 48);
        let mut layout = Layout::new();
        layout.push("fc.weight", [8, 6], LayerKind::Linear, 2.0);
        let problem = plain.problem_with(layout, &Device::flex());
        let layer = LayerGrid::new("fc.weight", vec![2, 6], (-3, 3));
        let grid = GridConfig::new(vec![layer]).with_tolerance(0.0);
        let solution = solve(&problem, &on_grid(Budget::Keep(30), grid)).unwrap();
        let layer = &rounded(&solution).layers[0];
        assert_eq!(layer.scales.len(), 12);
        let group = |index: usize| index / 6 / 4 * 6 + index % 6;
        let weights = wide(&solution);
        for (index, code) in layer.codes.iter().enumerate() {
            let value = |code: i32| f64::from(code as f32 * layer.scales[group(index)]);
            assert_eq!(weights[index], value(*code));
            if *code == 0 {
                continue;
            }
            for other in -3..=3 {
                let mut moved = weights.clone();
                moved[index] = value(other);
                let objective = plain.objective(&moved);
                assert!(
                    objective >= solution.objective * (1.0 - 1e-9),
                    "seed {seed}"
                );
            }
        }
        for at in 0..12 {
            for factor in [0.999, 1.001] {
                let scaled = |(index, weight): (usize, &f64)| match group(index) == at {
                    true => weight * factor,
                    false => *weight,
                };
                let moved: Vec<f64> = weights.iter().enumerate().map(scaled).collect();
                let objective = plain.objective(&moved);
                assert!(
                    objective >= solution.objective * (1.0 - 1e-9),
                    "seed {seed}"
                );
            }
        }
    }
}

#[test]
fn weights_without_a_grid_stay_real_numbers_at_their_best() {
    let mut layout = Layout::new();
    layout.push("fc1.weight", [6, 5], LayerKind::Linear, 2.0);
    layout.push("fc2.weight", [5, 2], LayerKind::Linear, 2.0);
    let plain = Plain::random(77, 30, 40);
    let problem = plain.problem_with(layout, &Device::flex());
    let grid = GridConfig::new(vec![LayerGrid::new("fc1.weight", vec![1, 1], (-1, 1))]);
    let grid = grid.with_tolerance(0.0).with_sweeps(2000);
    let solution = solve(&problem, &on_grid(Budget::All, grid)).unwrap();
    let weights = wide(&solution);
    let gradient = plain.gradient(&weights);
    let largest = plain
        .gradient(&vec![0.0; 40])
        .iter()
        .fold(0.0, |most: f64, g| most.max(g.abs()));
    assert!(
        gradient[30..].iter().all(|g| g.abs() < 1e-5 * largest),
        "{:?}",
        &gradient[30..]
    );
    assert!(gradient[..30].iter().any(|g| g.abs() > 1e-2 * largest));
    assert_eq!(rounded(&solution).layers.len(), 1);
}

/// More samples than weights: the search sees other rows, the objective is the same.
#[test]
fn with_many_samples_the_objective_is_that_of_all_of_them() {
    let plain = Plain {
        first_order: 0.05,
        ..Plain::random(11, 120, 30)
    };
    let method = Method::Chita(ChitaConfig::new());
    let config = on_grid(Budget::Keep(15), GridConfig::new(vec![shared((-7, 7))]));
    let solution = solve(&plain.problem(&Device::flex()), &config.with_method(method)).unwrap();
    let anew = plain.objective(&wide(&solution));
    assert!(
        (solution.objective - anew).abs() < 1e-5 * anew.abs(),
        "{anew}"
    );
}

/// Weights of 1e-6 and less in 8 bits: a scale of some 8e-9 leaves an error of 1e-5 of their squares.
#[test]
fn scales_are_as_small_as_the_weights() {
    let dense: Vec<f64> = (1..=12).map(|at| 1e-6 * f64::from(at) / 12.0).collect();
    let plain = Plain {
        dense,
        ..Plain::random(1, 5, 12)
    };
    let grid = GridConfig::nearest(vec![shared((-127, 127))]);
    let solution = solve(&plain.problem(&Device::flex()), &on_grid(Budget::All, grid)).unwrap();
    let scale = rounded(&solution).layers[0].scales[0];
    assert!(scale > 0.0 && scale < 1e-8, "{scale}");
    let square = |values: &[f64]| values.iter().map(|value| value * value).sum::<f64>();
    let found = wide(&solution);
    let off: Vec<f64> = found.iter().zip(&plain.dense).map(|(a, b)| a - b).collect();
    assert!(square(&off) < 1e-4 * square(&plain.dense), "{found:?}");
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let problem = Plain::random(1, 5, 12).problem(&Device::flex());
    let refused = |config: SolverConfig| solve(&problem, &config).unwrap_err();
    let all = |layers| on_grid(Budget::All, GridConfig::new(layers));
    let grid = |groups: Vec<usize>| LayerGrid::new("weights", groups, (-1, 1));
    let layers = [
        ("do not divide", vec![grid(vec![5])]),
        ("do not divide", vec![grid(vec![1, 1])]),
        ("do not divide", vec![grid(vec![0])]),
        ("hold 0", vec![shared((1, 3))]),
        ("hold 0", vec![shared((0, 0))]),
        ("hold 0", vec![shared((i32::MIN, i32::MAX))]),
        ("two grids", vec![grid(vec![1]), grid(vec![1])]),
        (
            "2 scales for 3",
            vec![grid(vec![3]).with_scales(vec![1.0; 2])],
        ),
        ("above 0", vec![grid(vec![1]).with_scales(vec![0.0])]),
        ("above 0", vec![grid(vec![1]).with_scales(vec![f32::NAN])]),
    ];
    for (reason, layers) in layers {
        match refused(all(layers)) {
            error @ PruneError::LayerGrid { .. } => {
                assert_says!(error, reason);
            }
            other => panic!("{reason}: {other:?}"),
        }
    }
    let unknown = refused(all(vec![LayerGrid::new("fc", vec![1], (-1, 1))]));
    assert_matches!(unknown, PruneError::UnknownLayer { .. });
    let one = || vec![shared((-1, 1))];
    let cases = [
        ("grid.layers", all(Vec::new())),
        (
            "grid.tolerance",
            on_grid(Budget::All, GridConfig::new(one()).with_tolerance(f64::NAN)),
        ),
        ("budget", SolverConfig::new(Budget::All)),
        ("block_size", all(one()).with_block_size(Some(4))),
    ];
    for (field, config) in cases {
        match refused(config) {
            PruneError::InvalidConfig { field: found, .. } => assert_eq!(found, field),
            other => panic!("{field}: {other:?}"),
        }
    }
}

#[test]
fn a_config_survives_its_file() {
    let config = on_grid(
        Budget::All,
        GridConfig::new(vec![shared((-1, 1)).with_scales(vec![0.5])])
            .with_first(FirstCodes::Nearest)
            .with_sweeps(3),
    );
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<SolverConfig>(&json).unwrap(), config);
}
