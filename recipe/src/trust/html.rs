//! The report as one page.

use super::{Bounds, Energy, Share, Side, Trust, plots};
use crate::RecipeError;
use crate::check::percent_text;

const STYLE: &str = "body{font-family:sans-serif;max-width:900px;margin:2em auto;padding:0 1em;\
color:#222}table{border-collapse:collapse;margin:1em 0}td,th{padding:.35em .9em;border-bottom:1px \
solid #ddd;text-align:right}td:first-child,th:first-child{text-align:left}.broken{background:#fde8e8;\
border-left:4px solid #c00;padding:.6em 1em}.kept{background:#e8f6ea;border-left:4px solid #2a8a3a;\
padding:.6em 1em}.note{color:#666;font-size:.9em}svg{max-width:100%;height:auto}";

pub(super) fn page(trust: &Trust) -> Result<String, RecipeError> {
    let Trust {
        original,
        compressed,
        ..
    } = trust;
    let mut body = format!(
        "<h1>{} beside {}</h1>\n<p>{} labelled examples; intervals of {} %.</p>\n",
        escaped(&compressed.stage),
        escaped(&original.stage),
        trust.examples,
        percent_text(trust.confidence, 1)
    );
    body += &verdict(trust);
    body += "<table>\n<tr><th></th>";
    for side in [original, compressed] {
        body += &format!("<th>{}</th>", escaped(&side.stage));
    }
    body += "</tr>\n";
    type Say = fn(&Side) -> String;
    let rows: [(&str, Say); 6] = [
        ("accuracy", |side| share(&side.accuracy)),
        ("expected calibration error", |side| {
            format!("{:.4}", side.ece)
        }),
        ("bytes", |side| side.bytes.to_string()),
        ("latency [ms]", |side| match side.latency_ms {
            Some(latency) => format!("{latency:.3}"),
            None => "not measured".into(),
        }),
        ("joules per task, in Burn", |side| joules(&side.energy)),
        ("tasks per kWh; tasks/s per watt, in Burn", |side| {
            tasks(&side.energy)
        }),
    ];
    for (name, say) in rows {
        body += &format!(
            "<tr><td>{name}</td><td>{}</td><td>{}</td></tr>\n",
            escaped(&say(original)),
            escaped(&say(compressed))
        );
    }
    body += "</table>\n";
    for side in [original, compressed] {
        for note in energy_notes(&side.energy) {
            let note = format!("Energy of {}: {note}.", side.stage);
            body += &format!("<p class=\"note\">{}</p>\n", escaped(&note));
        }
    }
    body += "<h2>Where they disagree</h2>\n";
    body += &format!(
        "<p>They answer differently on {}. Only the original is right on {} examples, only the \
         compressed model on {}: McNemar's exact test gives p {}.</p>\n",
        share(&trust.disagreement),
        trust.only_original,
        trust.only_compressed,
        escaped(&p_value(trust.mcnemar_p))
    );
    body += "<h2>Calibration</h2>\n";
    body += &plots::reliability(trust)?;
    body += "<p class=\"note\">Bars: accuracy of the examples in a bin of confidence; on the line, \
             confidence is what it says. Points: mean confidence. Grey: how many examples.</p>\n";
    body += "<h2>Robustness</h2>\n";
    body += &plots::robustness(trust)?;
    body += "<p class=\"note\">σ is the deviation of a batch; shifts are along the last axis, in \
             places.</p>\n<h2>Layers</h2>\n";
    body += &plots::layers(trust)?;
    body += "<p class=\"note\">Signal to noise: of weights against those of the original, pruning \
             and training included; of activations (orange) before and after their quantizers.</p>\n";
    let title = escaped(&format!("{} beside {}", compressed.stage, original.stage));
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\
         <style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n"
    ))
}

fn verdict(trust: &Trust) -> String {
    if trust.bounds == Bounds::default() {
        return "<p class=\"note\">No bound was given.</p>\n".into();
    }
    if trust.broken.is_empty() {
        return "<p class=\"kept\">No bound is broken.</p>\n".into();
    }
    let items = trust.broken.iter();
    let items = items.map(|broken| format!("<li>{}</li>", escaped(&broken.to_string())));
    format!(
        "<div class=\"broken\">Broken bounds:<ul>{}</ul></div>\n",
        items.collect::<String>()
    )
}

fn share(share: &Share) -> String {
    format!(
        "{} % ({} to {})",
        percent_text(share.value, 2),
        percent_text(share.low, 2),
        percent_text(share.high, 2)
    )
}

/// A probability of chance, which is never none.
fn p_value(p: f64) -> String {
    match p < 0.001 {
        true => "< 0.001".into(),
        false => format!("= {p:.3}"),
    }
}

/// The sum, and its parts where it has several.
fn joules(energy: &Energy) -> String {
    let Energy::Measured {
        joules_per_task,
        parts,
        ..
    } = energy
    else {
        return "not measurable here".into();
    };
    let named = parts
        .iter()
        .map(|part| format!("{} {}", digits(part.joules_per_task), part.counter));
    let named: Vec<_> = named.collect();
    match parts.len() {
        0 => digits(*joules_per_task),
        1 => named.concat(),
        _ => format!("{} = {}", digits(*joules_per_task), named.join(" + ")),
    }
}

fn tasks(energy: &Energy) -> String {
    match energy {
        Energy::Measured {
            tasks_per_kwh,
            tasks_per_second_per_watt,
            ..
        } => format!("{tasks_per_kwh:.0}; {}", digits(*tasks_per_second_per_watt)),
        Energy::NotMeasurable { .. } => "not measurable here".into(),
    }
}

/// A positive number with four significant digits.
fn digits(value: f64) -> String {
    let decimals = (3.0 - value.log10().floor()).clamp(0.0, 12.0) as usize;
    format!("{value:.decimals$}")
}

/// What was not measured, and why.
fn energy_notes(energy: &Energy) -> Vec<String> {
    match energy {
        Energy::Measured { uncounted, .. } => {
            let notes = uncounted.iter();
            notes
                .map(|reason| format!("not in the sum: {reason}"))
                .collect()
        }
        Energy::NotMeasurable { reason } => vec![reason.clone()],
    }
}

/// Text as HTML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
