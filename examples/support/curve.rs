//! Curves over training steps, as CSV and as SVG.

use std::fmt::Write;
use std::ops::Range;
use std::path::Path;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

/// Colours that people who see colours differently can tell apart, too, by Okabe and Ito.
pub(super) const COLORS: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x44, 0x44, 0x44),
];

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
    /// Whether there is something between two steps: lines, or dots alone.
    pub(crate) joined: bool,
    pub(crate) value: &'a str,
    pub(crate) values: Values,
}

/// Width and height, and where the names of the curves begin.
const SIZE: (u32, u32) = (920, 520);
const NAMES: i32 = 690;
/// About how many values an axis names.
const TICKS: f64 = 6.0;

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
        joined: true,
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
        Values::Positive => value.max(1e-9).log10(),
        Values::Percent => value,
    };
    let name = |step: &usize| {
        let name = axes.steps.get(*step).cloned();
        name.unwrap_or_else(|| step.to_string())
    };
    let values = points().map(|(_, value)| *value);
    let range = range(axes.values, values.filter(|value| value.is_finite()));
    let ticks = match axes.values {
        Values::Positive => logarithmic_ticks(range.start, range.end),
        Values::Percent => even_ticks(range.start, range.end),
    };
    let label = |place: &f64| {
        let tick = ticks.iter().find(|tick| tick.0 == *place);
        tick.map_or(String::new(), |tick| tick.1.clone())
    };
    let axis = Axis {
        range,
        ticks: ticks.iter().map(|tick| tick.0).collect(),
    };

    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(|error| failed(path, error))?;
    let (plot, names) = root.split_horizontally(NAMES);
    let mut chart = ChartBuilder::on(&plot)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(first_step..last_step.max(first_step + 1), axis)
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
        let style = COLORS[index % COLORS.len()].stroke_width(2);
        let points = || {
            let finite = curve.points.iter().filter(|(_, value)| value.is_finite());
            finite.map(|(step, value)| (*step, place(*value)))
        };
        if axes.joined {
            chart
                .draw_series(LineSeries::new(points(), style))
                .map_err(|error| failed(path, error))?;
        }
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
fn range(kind: Values, values: impl Iterator<Item = f64>) -> Range<f64> {
    let (lowest, highest) = values
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        });
    match kind {
        _ if lowest > highest => 0.0..1.0,
        Values::Positive => {
            let lowest = lowest.max(1e-9);
            let highest = highest.max(1.1 * lowest);
            (0.95 * lowest).log10()..(1.2 * highest).log10()
        }
        Values::Percent => {
            let room = (0.08 * (highest - lowest)).max(0.1);
            (lowest - room).max(0.0)..(highest + room).min(100.0)
        }
    }
}

/// An axis with ticks where they are wanted.
struct Axis {
    range: Range<f64>,
    ticks: Vec<f64>,
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        RangedCoordf64::from(self.range.clone()).map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, _hint: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

/// Places on the axis and what stands there, of 1, 2 and 5 times powers of ten, or of powers of ten alone where
/// those are too many; of a part of a decade, as [`even_ticks`].
fn logarithmic_ticks(low: f64, high: f64) -> Vec<(f64, String)> {
    let decades = low.floor() as i32..=high.ceil() as i32;
    let of = |leading: &[u32]| -> Vec<(f64, String)> {
        let all = decades.clone().flat_map(|decade| {
            let tick = move |leading: &u32| {
                let value = f64::from(*leading) * 10f64.powi(decade);
                (value.log10(), decimal(value, decade))
            };
            leading.iter().map(tick).collect::<Vec<_>>()
        });
        all.filter(|(place, _)| (low..=high).contains(place))
            .collect()
    };
    let fine = of(&[1, 2, 5]);
    match fine.len() {
        0..3 => even_ticks(10f64.powf(low), 10f64.powf(high))
            .into_iter()
            .filter_map(|(_, text)| Some((text.parse::<f64>().ok()?.log10(), text)))
            .collect(),
        3..11 => fine,
        _ => of(&[1]),
    }
}

/// Multiples of 1, 2 or 5 times a power of ten, and their texts.
fn even_ticks(low: f64, high: f64) -> Vec<(f64, String)> {
    let rough = (high - low) / TICKS;
    let decade = rough.log10().floor() as i32;
    let unit = 10f64.powi(decade);
    let step = [1.0, 2.0, 5.0, 10.0].map(|leading| leading * unit);
    let step = step.into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(10.0 * unit);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    let tick = |multiple| {
        let value = multiple as f64 * step;
        (value, decimal(value, decade))
    };
    (first..=last).map(tick).collect()
}

/// A value of so many decimals.
fn decimal(value: f64, decade: i32) -> String {
    format!("{value:.*}", decade.min(0).unsigned_abs() as usize)
}

fn failed(path: &Path, error: impl std::fmt::Display) -> String {
    format!("cannot write {}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn percent(values: &[f64]) -> Range<f64> {
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
        let filled = 3.0 / (axis.end - axis.start);
        assert!(
            filled > 0.95 && axis.start < -3.0 && axis.end > 0.0,
            "{axis:?}"
        );
    }

    #[test]
    fn an_axis_names_round_values() {
        let texts = |ticks: Vec<(f64, String)>| -> Vec<String> {
            ticks.into_iter().map(|(_, text)| text).collect()
        };
        assert_eq!(
            texts(even_ticks(96.9, 98.5)),
            ["97.0", "97.5", "98.0", "98.5"]
        );
        assert_eq!(
            texts(even_ticks(0.0, 100.0)),
            ["0", "20", "40", "60", "80", "100"]
        );
        let logarithmic = |low: f64, high: f64| texts(logarithmic_ticks(low.log10(), high.log10()));
        assert_eq!(logarithmic(0.9, 21.0), ["1", "2", "5", "10", "20"]);
        assert_eq!(logarithmic(0.04, 0.6), ["0.05", "0.1", "0.2", "0.5"]);
        assert_eq!(logarithmic(2.1, 3.1), ["2.2", "2.4", "2.6", "2.8", "3.0"]);
        assert_eq!(
            logarithmic(1e-3, 1e2),
            ["0.001", "0.01", "0.1", "1", "10", "100"]
        );
    }
}
