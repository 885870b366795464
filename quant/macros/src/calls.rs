//! The calls in an item.

use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit_mut::{self, VisitMut};
use syn::{
    Block, Expr, ExprCall, ExprMethodCall, ExprPath, ImplItemFn, ItemFn, Macro, Path,
    PathArguments, Token, TraitItemFn, UnOp, parse_quote,
};

/// The layers that have quantizers.
const LAYERS: [&str; 21] = [
    "Linear",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Embedding",
    "SwiGlu",
    "MultiHeadAttention",
    "PositionWiseFeedForward",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "Rnn",
    "Lstm",
    "Gru",
    "BiRnn",
    "BiLstm",
    "BiGru",
];

/// Puts two references before the receiver of `forward`.
pub(crate) struct Calls {
    path: Path,
    /// Whether there was a call since it was last asked.
    found: bool,
    pub(crate) errors: Vec<syn::Error>,
}

impl Calls {
    pub(crate) fn new(path: Path) -> Self {
        Self {
            path,
            found: false,
            errors: Vec::new(),
        }
    }

    /// The traits, where the function that is visited calls something.
    fn import(&mut self, block: &mut Block, found_before: bool) {
        if std::mem::replace(&mut self.found, found_before) {
            let path = &self.path;
            // Which of them a call is of, only its receiver's type tells.
            let import = parse_quote! {
                #[allow(unused_imports)]
                use #path::{
                    ForwardOfEncoderLayer as _, ForwardOfOneInput as _, ForwardOfSequence as _,
                };
            };
            block.stmts.insert(0, import);
        }
    }

    /// Method lookup comes by `&&Layer`, where the traits are, before `&Layer`.
    fn referenced(&mut self, receiver: &Expr) -> Expr {
        self.found = true;
        parse_quote!((&&(#receiver)))
    }
}

/// Whether the path is that of the `forward` of a layer, by the layer's name.
fn of_layer(path: &Path) -> bool {
    let mut segments = path.segments.iter().rev();
    let (name, layer) = (segments.next(), segments.next());
    name.is_some_and(|name| name.ident == "forward")
        && layer.is_some_and(|layer| LAYERS.iter().any(|known| layer.ident == known))
}

/// Whether it is `&mut place`, which nothing but a method that needs it is called on.
fn is_mutable(receiver: &Expr) -> bool {
    match receiver {
        Expr::Paren(inner) => is_mutable(&inner.expr),
        Expr::Group(inner) => is_mutable(&inner.expr),
        Expr::Reference(reference) => reference.mutability.is_some(),
        Expr::Unary(unary) => matches!(unary.op, UnOp::Deref(_)) && is_mutable(&unary.expr),
        _ => false,
    }
}

impl VisitMut for Calls {
    fn visit_impl_item_fn_mut(&mut self, function: &mut ImplItemFn) {
        let found_before = std::mem::take(&mut self.found);
        visit_mut::visit_impl_item_fn_mut(self, function);
        self.import(&mut function.block, found_before);
    }

    fn visit_item_fn_mut(&mut self, function: &mut ItemFn) {
        let found_before = std::mem::take(&mut self.found);
        visit_mut::visit_item_fn_mut(self, function);
        self.import(&mut function.block, found_before);
    }

    fn visit_trait_item_fn_mut(&mut self, function: &mut TraitItemFn) {
        let found_before = std::mem::take(&mut self.found);
        visit_mut::visit_trait_item_fn_mut(self, function);
        if let Some(block) = &mut function.default {
            self.import(block, found_before);
        }
    }

    fn visit_expr_method_call_mut(&mut self, call: &mut ExprMethodCall) {
        visit_mut::visit_expr_method_call_mut(self, call);
        if call.method == "forward" && !is_mutable(&call.receiver) {
            *call.receiver = self.referenced(&call.receiver);
            // The traits' methods have none; the input tells.
            call.turbofish = None;
        }
    }

    fn visit_expr_mut(&mut self, expr: &mut Expr) {
        if let Expr::Call(ExprCall { func, args, .. }) = expr
            && let Expr::Path(ExprPath { path, .. }) = &**func
            && of_layer(path)
            && let Some(receiver) = args.first().cloned()
        {
            let method = path.segments.last().map(|segment| segment.ident.clone());
            let others: Vec<Expr> = args.iter().skip(1).cloned().collect();
            let mut call: Expr = parse_quote!((#receiver).#method(#(#others),*));
            self.visit_expr_mut(&mut call);
            *expr = call;
            return;
        }
        visit_mut::visit_expr_mut(self, expr);
    }

    fn visit_expr_path_mut(&mut self, path: &mut ExprPath) {
        if of_layer(&path.path) {
            let mut name = path.path.clone();
            for segment in &mut name.segments {
                segment.arguments = PathArguments::None;
            }
            let name = quote!(#name).to_string().replace(' ', "");
            self.errors.push(syn::Error::new(
                path.span(),
                format!(
                    "`{name}` as a value runs past the quantizers of the layer: write a closure, \
                     `|x| layer.forward(x)`"
                ),
            ));
        }
        visit_mut::visit_expr_path_mut(self, path);
    }

    /// Of a macro that takes expressions, these are visited.
    fn visit_macro_mut(&mut self, call: &mut Macro) {
        let found_before = std::mem::take(&mut self.found);
        if let Ok(Arguments(mut expressions)) = call.parse_body() {
            for expression in &mut expressions {
                self.visit_expr_mut(expression);
            }
            if self.found {
                call.tokens = quote!(#expressions);
            }
        } else if let Ok(Repeated { mut value, len }) = call.parse_body() {
            self.visit_expr_mut(&mut value);
            if self.found {
                call.tokens = quote!(#value; #len);
            }
        }
        self.found |= found_before;
    }
}

/// `a, b, …`
struct Arguments(Punctuated<Expr, Token![,]>);

impl Parse for Arguments {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        Punctuated::parse_terminated(input).map(Self)
    }
}

/// `value; len`
struct Repeated {
    value: Expr,
    len: Expr,
}

impl Parse for Repeated {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let value = input.parse()?;
        input.parse::<Token![;]>()?;
        let len = input.parse()?;
        Ok(Self { value, len })
    }
}
