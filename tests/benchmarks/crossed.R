# Fits crossed random intercepts with lme4 (normal responses) or glmmTMB (binary ones) and prints JSON.
#
#   Rscript crossed.R FILE METHOD
#
# FILE is a CSV table with the response y and the factors s and d; METHOD is lmer or glmmTMB.

arguments <- commandArgs(trailingOnly = TRUE)
method <- arguments[[2]]
suppressWarnings(suppressPackageStartupMessages(library(if (method == "lmer") "lme4" else "glmmTMB", character.only = TRUE)))
data <- read.csv(arguments[[1]])
data$s <- factor(data$s)
data$d <- factor(data$d)

start <- proc.time()
fit <- if (method == "lmer") {
  lmer(y ~ (1 | s) + (1 | d), data = data)
} else {
  glmmTMB(y ~ (1 | s) + (1 | d), data = data, family = binomial())
}
taken <- proc.time() - start

intercept <- if (method == "lmer") fixef(fit) else fixef(fit)$cond
parts <- if (method == "lmer") VarCorr(fit) else VarCorr(fit)$cond
cat(sprintf(
  '{"seconds": %.3f, "processor_seconds": %.3f, "intercept": %.6g, "sd_s": %.6g, "sd_d": %.6g, "noise": %.6g}\n',
  taken[["elapsed"]], sum(taken[c("user.self", "sys.self")]), intercept[[1]],
  attr(parts$s, "stddev")[[1]], attr(parts$d, "stddev")[[1]], sigma(fit)
))
