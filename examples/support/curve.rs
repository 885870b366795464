//! Curves over training steps, as CSV and as SVG.

use std::fmt::Write;
use std::path::Path;

use plotters::prelude::*;

/// One line of a figure.
#[derive(Debug, Clone)]
pub(crate) struct Curve {
    pub(crate) name: String,
    /// (step, value)
    pub(crate) points: Vec<(usize, f64)>,
}

/// Writes the curves as `curve,step,value` rows.
pub(crate) fn write_csv(path: &Path, curves: &[Curve]) -> Result<(), String> {
    let mut csv = String::from("curve,step,value\n");
    for curve in curves {
        for (step, value) in &curve.points {
            let _ = writeln!(csv, "{},{step},{value}", curve.name);
        }
    }
    std::fs::write(path, csv).map_err(|error| failed(path, error))
}

/// What the values of a figure are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Values {
    /// Losses: positive, on a logarithmic axis.
    Positive,
    /// Accuracies: on a linear axis, of which 100 is the most.
    Percent,
}

/// What a figure says about its axes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Axes<'a> {
    pub(crate) step: &'a str,
    /// Names of the steps 0, 1, ..; where there are none, their numbers.
    pub(crate) steps: &'a [String],
    pub(crate) value: &'a str,
    pub(crate) values: Values,
}

/// Width and height, and where the names of the curves begin.
const SIZE: (u32, u32) = (860, 520);
const NAMES: i32 = 690;

/// Draws positive values over the training step.
pub(crate) fn write_svg(
    path: &Path,
    title: &str,
    value: &str,
    curves: &[Curve],
) -> Result<(), String> {
    let axes = Axes {
        step: "step",
        steps: &[],
        value,
        values: Values::Positive,
    };
    write_svg_over(path, title, axes, curves)
}

/// Draws the curves over whatever their steps are, with their names beside them.
pub(crate) fn write_svg_over(
    path: &Path,
    title: &str,
    axes: Axes<'_>,
    curves: &[Curve],
) -> Result<(), String> {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let first_step = points().map(|(step, _)| *step).min().unwrap_or(0);
    let first_step = if axes.step == "step" { 0 } else { first_step };
    let last_step = points().map(|(step, _)| *step).max().unwrap_or(1);
    let place = |value: f64| match axes.values {
        // Base 2 has ticks where plotters' own, base 10, would have one or none.
        Values::Positive => value.max(1e-9).log2(),
        Values::Percent => value,
    };
    let label = |place: &f64| match axes.values {
        Values::Positive => format!("{:.2}", place.exp2()),
        Values::Percent => format!("{place:.1}"),
    };
    let name = |step: &usize| {
        let name = axes.steps.get(*step).cloned();
        name.unwrap_or_else(|| step.to_string())
    };
    let values = points().map(|(_, value)| *value);
    let range = range(axes.values, values.filter(|value| value.is_finite()));

    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(|error| failed(path, error))?;
    let (plot, names) = root.split_horizontally(NAMES);
    let mut chart = ChartBuilder::on(&plot)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(first_step..last_step.max(first_step + 1), range)
        .map_err(|error| failed(path, error))?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc(axes.step)
        .y_desc(axes.value)
        .x_label_formatter(&name)
        .y_label_formatter(&label);
    if !axes.steps.is_empty() {
        mesh.x_labels(axes.steps.len());
    }
    mesh.draw().map_err(|error| failed(path, error))?;
    for (index, curve) in curves.iter().enumerate() {
        let style = Palette99::pick(index).stroke_width(2);
        let points = || {
            let finite = curve.points.iter().filter(|(_, value)| value.is_finite());
            finite.map(|(step, value)| (*step, place(*value)))
        };
        chart
            .draw_series(LineSeries::new(points(), style))
            .map_err(|error| failed(path, error))?;
        // Of few points each counts.
        if curve.points.len() <= 20 {
            let dots = points().map(|point| Circle::new(point, 3, style.filled()));
            chart
                .draw_series(dots)
                .map_err(|error| failed(path, error))?;
        }
        let row = 60 + 22 * index as i32;
        names
            .draw(&PathElement::new([(8, row), (32, row)], style))
            .map_err(|error| failed(path, error))?;
        names
            .draw(&Text::new(
                curve.name.clone(),
                (40, row - 7),
                ("sans-serif", 14),
            ))
            .map_err(|error| failed(path, error))?;
    }
    root.present().map_err(|error| failed(path, error))
}

/// The axis that shows all values, with some room around them.
fn range(kind: Values, values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (lowest, highest) = values
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        });
    match kind {
        _ if lowest > highest => 0.0..1.0,
        Values::Positive => {
            let lowest = lowest.max(1e-9);
            let highest = highest.max(1.1 * lowest);
            (0.95 * lowest).log2()..(1.2 * highest).log2()
        }
        Values::Percent => {
            let room = (0.08 * (highest - lowest)).max(0.1);
            (lowest - room).max(0.0)..(highest + room).min(100.0)
        }
    }
}

fn failed(path: &Path, error: impl std::fmt::Display) -> String {
    format!("cannot write {}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn percent(values: &[f64]) -> std::ops::Range<f64> {
        range(Values::Percent, values.iter().copied())
    }

    #[test]
    fn no_accuracy_is_above_100_or_below_0() {
        for values in [&[97.5, 100.0][..], &[100.0], &[0.0, 100.0], &[0.0], &[]] {
            let axis = percent(values);
            assert!(
                axis.start >= 0.0 && axis.end <= 100.0,
                "{values:?}: {axis:?}"
            );
            assert!(axis.start < axis.end, "{values:?}: {axis:?}");
            for value in values {
                assert!(
                    (axis.start..=axis.end).contains(value),
                    "{values:?}: {axis:?}"
                );
            }
        }
    }

    #[test]
    fn the_spread_of_the_values_fills_the_axis() {
        for values in [[97.22, 98.33], [10.0, 95.0], [99.0, 100.0]] {
            let axis = percent(&values);
            let filled = (values[1] - values[0]) / (axis.end - axis.start);
            assert!(filled > 0.8, "{values:?}: {filled} of {axis:?}");
        }
        // Of losses by their logarithms.
        let axis = range(Values::Positive, [1e-3, 1.0].into_iter());
        let filled = 1000f64.log2() / (axis.end - axis.start);
        assert!(
            filled > 0.95 && axis.start < 1e-3f64.log2() && axis.end > 0.0,
            "{axis:?}"
        );
    }
}
