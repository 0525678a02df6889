# Fits simulated data sets with glmmTMB (Laplace) and lme4, and writes estimates and 95 % intervals.
#
#   Rscript simulated_glmms.R DATA OUT FAMILY slopes|intercepts
#
# DATA is a CSV table: set, id, time, group, y. lme4 has adaptive quadrature with 25 nodes where there are intercepts
# alone, else Laplace. Intervals are those that the packages give: Wald for coefficients; for standard deviations, Wald on
# the log scale (glmmTMB) and profiles (lme4, intercepts alone: with slopes they take most of a minute, and often fail).

suppressWarnings(suppressPackageStartupMessages({
  library(lme4)
  library(glmmTMB)
}))
arguments <- commandArgs(trailingOnly = TRUE)
data <- read.csv(arguments[[1]])
data$id <- factor(data$id)
family <- get(arguments[[3]])()
slopes <- arguments[[4]] == "slopes"
formula <- if (slopes) y ~ time * group + (1 + time | id) else y ~ time * group + (1 | id)

none <- matrix(NA_real_, if (slopes) 3 else 1, 2)
timed <- function(expression) {
  start <- proc.time()
  value <- tryCatch(suppressWarnings(suppressMessages(expression)), error = function(e) e)
  list(value = value, taken = proc.time() - start)
}
# Standard deviations, and the correlation, of VarCorr.
scales <- function(v) c(attr(v, "stddev"), if (slopes) attr(v, "correlation")[1, 2])

by_glmmTMB <- function(d) {
  fit <- timed(glmmTMB(formula, data = d, family = family))
  if (inherits(fit$value, "error")) return(list(fit = fit, status = "error"))
  intervals <- timed({
    all <- confint(fit$value)
    all[, 1:2, drop = FALSE]
  })
  converged <- fit$value$fit$convergence == 0 && isTRUE(fit$value$sdr$pdHess)
  list(
    fit = fit, intervals = intervals$value, more = intervals$taken,
    estimates = c(fixef(fit$value)$cond, scales(VarCorr(fit$value)$cond$id)),
    status = if (converged) "converged" else "not converged"
  )
}

by_lme4 <- function(d) {
  fit <- timed(glmer(formula, data = d, family = family, nAGQ = if (slopes) 1 else 25))
  if (inherits(fit$value, "error")) return(list(fit = fit, status = "error"))
  intervals <- timed({
    fixed <- confint(fit$value, parm = "beta_", method = "Wald")
    of_scales <- if (slopes) none else {
      tryCatch(confint(fit$value, parm = "theta_", method = "profile", quiet = TRUE), error = function(e) none)
    }
    rbind(fixed, of_scales)
  })
  converged <- fit$value@optinfo$conv$opt == 0 && (isSingular(fit$value) || is.null(fit$value@optinfo$conv$lme4$code))
  list(
    fit = fit, intervals = intervals$value, more = intervals$taken,
    estimates = c(fixef(fit$value), scales(VarCorr(fit$value)$id)),
    status = if (!converged) "not converged" else if (isSingular(fit$value)) "singular" else "converged"
  )
}

joined <- function(x) paste(ifelse(is.na(x), "nan", sprintf("%.5g", x)), collapse = ";")
processor <- function(taken) round(sum(taken[c("user.self", "sys.self")]), 4)
row <- function(set, method, found) {
  bounds <- found$intervals
  if (is.null(bounds) || inherits(bounds, "error")) bounds <- matrix(NA_real_, length(found$estimates), 2)
  data.frame(
    set = set, method = method, status = found$status,
    seconds = found$fit$taken[["elapsed"]], cpu = processor(found$fit$taken),
    interval_cpu = if (is.null(found$more)) NA else processor(found$more),
    estimates = joined(found$estimates), low = joined(bounds[, 1]), high = joined(bounds[, 2])
  )
}

rows <- list()
for (set in unique(data$set)) {
  d <- droplevels(data[data$set == set, ])
  rows <- c(rows, list(row(set, "glmmTMB", by_glmmTMB(d)), row(set, "lme4", by_lme4(d))))
}
found <- do.call(rbind, rows)
found$version <- paste0(
  "R ", getRversion(), ", glmmTMB ", packageVersion("glmmTMB"), ", TMB ", packageVersion("TMB"), ", lme4 ",
  packageVersion("lme4")
)
write.csv(found, arguments[[2]], row.names = FALSE)
